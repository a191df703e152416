"""Gradients that came and come no more: for how many samples they have been away, and whether chance explains it."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainsentry.anomaly.series_arrays import Floats, Integers, Mask, SeriesArrays, rows_where

LONGER: Final = 3
"""The longest absence so far, times this: tasks may come in blocks."""

RECENT: Final = 8
"""Newest norms that are remembered: the last one is compared with their median."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """When an absence is none of chance.

    `had_before` is how many samples must have had the gradient, `fewest` how many in a row must lack it. `chance` is
    the probability below which so many in a row are no chance, and `faded` the share of the median norm below which the
    last one had faded: a unit that dies, or a weight that a schedule takes to zero, tells by its fall.
    """

    had_before: int
    fewest: int
    chance: float
    faded: float


class Absences:
    """Counts for each series the samples that had the gradient, those that had not, and those in a row up to now.

    The share of samples without one is taken from those before, by the rule of succession (Laplace, 1814). An absence
    is told once.
    """

    def __init__(self, arrays: SeriesArrays, bounds: Bounds) -> None:
        self._bounds = bounds
        column = arrays.series.column
        self._had, self._had_not = column(np.int64), column(np.int64)
        self._away, self._longest = column(np.int64), column(np.int64)
        self._since, self._newest = column(np.int64, -1), column(np.int64, -1)
        self._norms = column(np.float64, np.nan, shape=(RECENT,))
        self._told = column(bool)

    def begin_anew(self) -> None:
        """Forget all samples."""
        for column in (self._had, self._had_not, self._away, self._longest):
            column.values[:] = 0
        self._norms.values[:] = np.nan
        self._told.values[:] = False

    def come(self, ids: Integers, norms: Floats, step: int) -> None:
        """Take in a sample that has these gradients."""
        away = self._away.values[ids]
        self._longest.values[ids] = np.maximum(self._longest.values[ids], away)
        self._had_not.values[ids] += away
        self._norms.values[self._had.values[ids] % RECENT, ids] = norms
        self._had.values[ids] += 1
        self._away.values[ids] = 0
        self._newest.values[ids] = step
        self._told.values[ids] = False

    def stay_away(self, ids: Integers, step: int) -> None:
        """Take in a sample that lacks these gradients."""
        begin = ids[self._away.values[ids] == 0]
        self._since.values[begin] = step
        self._away.values[ids] += 1

    def are_no_chance(self, ids: Integers) -> Mask:
        """Return which of these gradients have been away for longer than chance explains, and are not told yet."""
        had, had_not, away = self._had.values[ids], self._had_not.values[ids], self._away.values[ids]
        share = (had_not + 1) / (had + had_not + 2)
        mask: Mask = away >= np.maximum(self._bounds.fewest, LONGER * self._longest.values[ids])
        mask &= (away * np.log(share) < math.log(self._bounds.chance)) & (had >= self._bounds.had_before)
        mask &= ~self._told.values[ids]
        places = rows_where(mask)
        if len(places):
            norms = self._norms.values[:, ids[places]]
            last = norms[(had[places] - 1) % RECENT, np.arange(len(places))]
            mask[places] = last >= self._bounds.faded * np.nanmedian(norms, axis=0)
        return mask

    def tell(self, ids: Integers) -> None:
        """Tell of these absences once."""
        self._told.values[ids] = True

    def is_away(self, series_id: int) -> bool:
        """Whether the last sample lacked a gradient."""
        return bool(self._away.values[series_id])

    def steps(self, series_id: int) -> tuple[int, int]:
        """Return the first step of an absence, and the last one before it that had the gradient."""
        return int(self._since.values[series_id]), int(self._newest.values[series_id])
