"""The debugger's grad_probe: writes a summary of chosen gradients before each update, in msprobe's layout."""

import csv
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import writable
from trainsentry.collectors.shared.private_files import make_private_folder
from trainsentry.collectors.statistics import MAX, MIN, NORM

PART: Final = "grad_probe"


@dataclass(frozen=True)
class Gradient:
    """One gradient: its values in floating point, a function that returns its raw bytes, and its row of statistics."""

    name: str
    values: npt.NDArray[Any]
    raw: Callable[[], bytes]
    row: npt.NDArray[np.float64]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class GradientSummary:
    """Writes `grad_summary_<step>.csv` to a folder, one file per update.

    L0 has MD5 (a CRC-32, as in msprobe), max, min, norm and shape of each gradient; L1 also its signs, as a file of
    booleans; L2 also the share of its values in each interval of `bounds`.
    """

    folder: Path
    level: str
    bounds: tuple[float, ...]

    def write(self, step: int, gradients: Iterable[Gradient]) -> None:
        """Write the gradients of an update."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"grad_summary_{step}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self._columns())
            for gradient in gradients:
                writer.writerow(self._line(step, gradient))

    def _columns(self) -> list[str]:
        intervals = {"L0": ["MD5"], "L1": [], "L2": [*_intervals(self.bounds), "=0"]}[self.level]
        return ["param_name", *intervals, "max", "min", "norm", "shape"]

    def _line(self, step: int, gradient: Gradient) -> list[Any]:
        name = writable(gradient.name)
        middle: list[Any] = []
        if self.level == "L0":
            middle = [f"{zlib.crc32(gradient.raw()):08x}"]
        elif self.level == "L2":
            middle = _shares(gradient.values.reshape(-1), self.bounds)
        if self.level != "L0":
            folder = self.folder / f"step{step}"
            make_private_folder(folder)
            np.save(folder / f"{name}.npy", gradient.values > 0)
        row = gradient.row
        return [name, *middle, row[MAX], row[MIN], row[NORM], list(gradient.shape)]


class GradientProbe:
    """Writes a summary before each chosen update; `names` are the chosen parameters, empty for all.

    Raises:
        ValueError: when a chosen parameter is not in `known`; the message calls those `known_as`.

    """

    def __init__(
        self,
        summary: GradientSummary,
        wanted: tuple[Sequence[int], Sequence[str]],
        known: Iterable[str],
        known_as: str,
        guard: Guard,
    ) -> None:
        self.summary = summary
        self.steps, self.names = frozenset(wanted[0]), frozenset(wanted[1])
        self.guard = guard
        self.step = 0
        unknown = self.names.difference(known)
        if unknown:
            raise ValueError(f"grad_probe.param_list: {min(unknown)!r}; allowed: names of {known_as}")

    def chooses(self, name: str) -> bool:
        """Whether a parameter is chosen."""
        return not self.names or name in self.names

    def before_update(self, gradients: Callable[[], Iterable[Gradient]]) -> None:
        """Write the gradients of an update if its step is chosen, and count the step."""
        if not self.steps or self.step in self.steps:
            self.guard.run(PART, lambda: self.summary.write(self.step, gradients()))
        self.step += 1


def _intervals(bounds: Sequence[float]) -> list[str]:
    """Return the names of the intervals between bounds.

    >>> _intervals((-1.0, 0.0))
    ['(-inf, -1.0]', '(-1.0, 0.0]', '(0.0, inf)']
    """
    if not bounds:
        return ["(-inf, inf)"]
    between = [f"({a}, {b}]" for a, b in pairwise(bounds)]
    return [f"(-inf, {bounds[0]}]", *between, f"({bounds[-1]}, inf)"]


def _shares(values: npt.NDArray[Any], bounds: Sequence[float]) -> list[float]:
    """Return the share of the values in each interval, and the share of zeros."""
    places = np.searchsorted(np.asarray(bounds, np.float32), values, side="left")
    counts = np.bincount(places, minlength=len(bounds) + 1)
    total = max(len(values), 1)
    return [*(float(n) / total for n in counts), float(np.count_nonzero(values == 0)) / total]
