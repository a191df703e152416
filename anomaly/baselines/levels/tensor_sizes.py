"""How many elements tensors have had lately: a far longer sequence has other extremes by right."""

from typing import Any, Final

import numpy as np

from trainsentry.anomaly.baselines.known_changes import has_left
from trainsentry.anomaly.series_arrays import Floats, Mask, SeriesArrays

LATELY: Final = 64
"""Samples after which the sizes before the last so many are forgotten: a training goes on with longer sequences for
hundreds of steps, and padding makes another length of each batch."""

NONE: Final = (np.inf, 0.0)
"""The smallest and the largest size where there was none."""


class TensorSizes:
    """The smallest and the largest size of each series over its last `LATELY` samples, and up to as many before.

    A size beyond them widens the range: the next one of those that vary is within it.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._ranges = [arrays.series.column(np.float64, none) for _ in range(2) for none in NONE]
        self._taken = arrays.series.column(np.int64)

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
        return has_left(smallest, largest, numel)

    def of(self, ids: Any) -> tuple[Floats, Floats]:
        """Return the smallest and the largest size of series, shape (n,) each."""
        older, newer = self._ranges[:2], self._ranges[2:]
        smallest: Floats = np.minimum(older[0].values[ids], newer[0].values[ids])
        largest: Floats = np.maximum(older[1].values[ids], newer[1].values[ids])
        return smallest, largest

    def adopt(self, series_id: int, smallest: float, largest: float) -> None:
        """Restore the sizes of a series."""
        self._ranges[2].values[series_id], self._ranges[3].values[series_id] = smallest, largest
