"""How many elements tensors have had lately: a far longer sequence has other extremes by right."""

from typing import Any, Final

import numpy as np

from trainsentry.anomaly.baselines.known_changes import has_left
from trainsentry.anomaly.series_arrays import Floats, Mask, SeriesArrays

LATELY: Final = 64
"""Samples after which the sizes before the last so many are forgotten: a training goes on with longer sequences for
hundreds of steps, and padding makes another length of each batch."""

STAGE: Final = 4
"""Samples in a row of one size, after which any that is beyond all of lately begins another stage of a curriculum."""

NONE: Final = (np.inf, 0.0)
"""The smallest and the largest size where there was none."""


class TensorSizes:
    """The smallest and the largest size of each series over its last `LATELY` samples, and up to as many before.

    A size beyond them widens the range: the next one of those that vary is within it.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._ranges = [arrays.series.column(np.float64, none) for _ in range(2) for none in NONE]
        self._taken = arrays.series.column(np.int64)
        self._last, self._in_a_row = arrays.series.column(np.float64), arrays.series.column(np.int64)

    def take_in(self, ids: Any, numel: Floats) -> Mask:
        """Take in the sizes of series; return which have left those of lately, shape (n,)."""
        older, newer = self._ranges[:2], self._ranges[2:]
        old = ids[self._taken.values[ids] == LATELY]
        for before, now, none in zip(older, newer, NONE, strict=True):
            before.values[old], now.values[old] = now.values[old], none
        self._taken.values[old] = 0
        self._taken.values[ids] += 1
        smallest, largest = self.of(ids)
        newer[0].values[ids] = np.minimum(newer[0].values[ids], numel)
        newer[1].values[ids] = np.maximum(newer[1].values[ids], numel)
        was_steady = self._in_a_row.values[ids] >= STAGE
        self._in_a_row.values[ids] = np.where(numel == self._last.values[ids], self._in_a_row.values[ids] + 1, 1)
        self._last.values[ids] = numel
        is_beyond = (largest > 0) & ((numel < smallest) | (numel > largest))
        found: Mask = has_left(smallest, largest, numel) | (is_beyond & was_steady)
        return found

    def of(self, ids: Any) -> tuple[Floats, Floats]:
        """Return the smallest and the largest size of series, shape (n,) each."""
        older, newer = self._ranges[:2], self._ranges[2:]
        smallest: Floats = np.minimum(older[0].values[ids], newer[0].values[ids])
        largest: Floats = np.maximum(older[1].values[ids], newer[1].values[ids])
        return smallest, largest

    def adopt(self, series_id: int, smallest: float, largest: float) -> None:
        """Restore the sizes of a series."""
        self._ranges[2].values[series_id], self._ranges[3].values[series_id] = smallest, largest
