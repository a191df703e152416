"""Gradients of chosen parameters on disk before each update."""

import csv
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.statistics import MAX, MIN, NORM
from trainsentry.collectors.torch.host_statistics import host_row
from trainsentry.collectors.torch.local_tensor import local, stored_values

PART: Final = "grad_probe"


class GradProbe:
    """Writes `grad_summary_<step>.csv` before each update of a model's parameters.

    L0: MD5, max, min, norm and shape of each gradient; L1: its signs too, as a file of booleans; L2: what share of it
    is in each interval of `bounds`, and its signs. `wanted` are the steps and the parameters; nothing means all.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        level: str,
        bounds: Sequence[float],
        wanted: tuple[Sequence[int], Sequence[str]],
        guard: Guard,
    ) -> None:
        self.folder = folder
        self.level = level
        self.bounds = tuple(bounds)
        self.steps, names = set(wanted[0]), set(wanted[1])
        self.guard = guard
        self.step = 0
        self._parameters = {n: p for n, p in model.named_parameters() if not names or n in names}
        unknown = names - set(self._parameters)
        if unknown:
            raise ValueError(f"grad_probe.param_list: {min(unknown)!r}; allowed: names of the model's parameters")
        self._own = {id(p) for p in self._parameters.values()}
        self._handle = register_optimizer_step_pre_hook(self._before_update)

    def close(self) -> None:
        """Write no more."""
        self._handle.remove()

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        held = (p for group in optimizer.param_groups for p in group["params"])
        if any(id(p) in self._own for p in held):
            if not self.steps or self.step in self.steps:
                self.guard.run(PART, self._write)
            self.step += 1

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"grad_summary_{self.step}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self._columns())
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    writer.writerow(self._row(name, local(parameter.grad).cpu()))

    def _columns(self) -> list[str]:
        intervals = {"L0": ["MD5"], "L1": [], "L2": [*_intervals(self.bounds), "=0"]}[self.level]
        return ["param_name", *intervals, "max", "min", "norm", "shape"]

    def _row(self, name: str, gradient: Tensor) -> list[Any]:
        stored, implicit = stored_values(gradient)
        row = host_row(stored, 0.0, implicit)
        middle: list[Any] = []
        if self.level == "L0":
            raw = stored.contiguous().reshape(-1).view(torch.uint8).numpy()
            middle = [f"{zlib.crc32(raw.tobytes()):08x}"]
        elif self.level == "L2":
            middle = _shares(stored.float().reshape(-1).numpy(), self.bounds)
        if self.level != "L0":
            folder = self.folder / f"step{self.step}"
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / f"{name}.npy", (stored > 0).numpy())
        return [name, *middle, row[MAX], row[MIN], row[NORM], list(gradient.shape)]


def _intervals(bounds: Sequence[float]) -> list[str]:
    """Return the names of the intervals between bounds.

    >>> _intervals((-1.0, 0.0))
    ['(-inf, -1.0]', '(-1.0, 0.0]', '(0.0, inf)']
    """
    if not bounds:
        return ["(-inf, inf)"]
    between = [f"({a}, {b}]" for a, b in pairwise(bounds)]
    return [f"(-inf, {bounds[0]}]", *between, f"({bounds[-1]}, inf)"]


def _shares(values: Any, bounds: Sequence[float]) -> list[float]:
    """Return which share of the values lies in each interval, and which is 0."""
    places = np.searchsorted(np.asarray(bounds, np.float32), values, side="left")
    counts = np.bincount(places, minlength=len(bounds) + 1)
    total = max(len(values), 1)
    return [*(float(n) / total for n in counts), float(np.count_nonzero(values == 0)) / total]
