"""Collects the curves of suspects and their siblings from a table, in the statistic that the sentence speaks of."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.exporters.csv.table_rows import RowKeys, TableRows

MAX_POINTS: Final = 2000
"""Points of a curve; a longer one keeps the extremes of each bin."""

Points = tuple[list[int], list[float]]
"""A curve: steps and values; Inf stands for a value that was not finite."""

SPOKEN: Final = {
    "max": "largest magnitude",
    "rms": "root mean square",
    "norm": "norm",
    "mean": "mean ÷ root mean square",
    "zeros": "share of zeros",
}
"""Statistics that a curve can show, in the words of the sentences."""

RATIOS: Final = ("mean",)
"""Those made of two columns, which must be of the same step."""

USUAL: Final = "rms"
"""What is shown of a suspect whose sentence speaks of something else, such as two ranks that differ."""

_Numbers = npt.NDArray[np.float64]


def shown_statistic(suspect: Mapping[str, Any]) -> str:
    """Return the statistic of a suspect's curve.

    >>> shown_statistic({"statistic": "max"}), shown_statistic({"statistic": "nans"})
    ('max', 'rms')
    """
    statistic = str(suspect.get("statistic", USUAL))
    return statistic if statistic in SPOKEN else USUAL


class SuspectCurves:
    """Takes a table's rows; keeps those of `suspects`, given as name and statistic, and of layers of their kinds."""

    def __init__(self, suspects: Sequence[tuple[str, str]]) -> None:
        self._kinds: dict[str, set[str]] = {}
        for name, statistic in suspects:
            self._kinds.setdefault(statistic, set()).add(kind_of(name))
        self._found: dict[str, dict[str, dict[int, float]]] = {statistic: {} for statistic in self._kinds}
        self._wanted: dict[tuple[bytes, str], list[tuple[int, str]]] = {}

    def take(self, rows: TableRows, keys: RowKeys, sizes: _Numbers, without: Sequence[str] = ()) -> None:
        """Add a step; layouts have `sizes` elements. Of micro-steps the largest value counts."""
        for statistic, curves in self._found.items():
            if statistic in without:
                continue
            wanted = self._wanted_of(rows, keys, statistic)
            if not wanted:
                continue
            values = _values(rows, [row for row, _ in wanted], statistic, sizes)
            for (_, name), value in zip(wanted, values.tolist(), strict=True):
                points = curves.setdefault(name, {})
                points[rows.step] = max(value, points.get(rows.step, value))
                if len(points) > 10 * MAX_POINTS:
                    curves[name] = dict(zip(*thin(points), strict=True))

    def thinned(self) -> dict[str, dict[str, Points]]:
        """Return the curves by statistic and name."""
        return {
            statistic: {name: thin(points) for name, points in curves.items()}
            for statistic, curves in self._found.items()
        }

    def _wanted_of(self, rows: TableRows, keys: RowKeys, statistic: str) -> list[tuple[int, str]]:
        """Return the rows to keep, each with its name."""
        key = rows.keys.tobytes(), statistic
        if len(self._wanted) >= 64:  # the order of rows changes with every step
            self._wanted.clear()
        if key not in self._wanted:
            names = [keys.keys[k].name for k in rows.keys.tolist()]
            kinds = self._kinds[statistic]
            self._wanted[key] = [(row, name) for row, name in enumerate(names) if kind_of(name) in kinds]
        return self._wanted[key]


def _values(rows: TableRows, at: list[int], statistic: str, sizes: _Numbers) -> _Numbers:
    """Return a statistic of some rows; Inf where the tensor was not finite, NaN where it was not recorded."""

    def column(name: str) -> _Numbers:
        if name not in rows.numbers:
            return np.full(len(at), np.nan)
        found: _Numbers = rows.values[at, rows.numbers.index(name)]
        return found

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rms = column("norm") / np.sqrt(sizes[rows.layouts[at]])
        if statistic == "max":
            found = np.fmax(np.abs(column("min")), np.abs(column("max")))
        elif statistic == "mean":
            found = column("mean") / rms
        else:
            found = rms if statistic == USUAL else column(statistic)
    bad = np.nan_to_num(column("nans")) + np.nan_to_num(column("infs")) > 0
    return np.where(bad, np.inf, found)


def kind_of(name: str) -> str:
    """Return a name without its numbers.

    >>> kind_of("layers.12.mlp.weight")
    'layers.*.mlp.weight'
    """
    return re.sub(r"\d+", "*", name)


def thin(points: Mapping[int, float], most: int = MAX_POINTS) -> Points:
    """Return at most `most` points: the lowest, the highest and the first non-finite value of each bin."""
    steps, values = np.asarray(list(points)), np.asarray(list(points.values()))
    if len(steps) > most:
        kept: set[int] = {0, len(steps) - 1}
        for part in np.array_split(np.arange(len(steps)), most // 3):
            finite = np.where(np.isfinite(values[part]), values[part], np.nan)
            kept.update(part[np.flatnonzero(np.isnan(finite))[:1]].tolist())
            if not np.isnan(finite).all():
                kept.update((int(part[np.nanargmin(finite)]), int(part[np.nanargmax(finite)])))
        order = sorted(kept)
        steps, values = steps[order], values[order]
    return steps.tolist(), values.tolist()
