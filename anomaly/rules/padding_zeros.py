"""Zeros that a mask of padding makes in each batch, of another length and share each time, and makes no more."""

from typing import Final

import numpy as np

from trainsentry.anomaly.series_arrays import Floats, Integers, Mask, SeriesArrays

PADDED: Final = 30
"""Samples in a row with zeros that make a mask of padding: a batch whose samples have one length has none."""

GONE: Final = 6
"""Samples in a row without any, after which the mask is lost: where one batch in ten has no padding, so many in a row
come by chance once in a million."""

LENGTHS: Final = 3
"""Samples among those, half of them, that have another size than the one before: batches that are packed need no
padding."""


class PaddingZeros:
    """Counts the samples with zeros, and those without, of tensors whose size varies from sample to sample."""

    def __init__(self, arrays: SeriesArrays) -> None:
        series = arrays.series
        self._padded, self._gone, self._lengths = (series.column(np.int64) for _ in range(3))
        self._least, self._most = series.column(np.float64, np.inf), series.column(np.float64)
        self._since, self._before = series.column(np.int64, -1), series.column(np.int64, -1)

    def reset(self) -> None:
        """Forget all masks, where dropouts are changed."""
        self._padded.values[:] = 0
        self._gone.values[:] = 0

    def has_zeros(self, ids: Integers) -> Mask:
        """Return which tensors have had zeros for long enough, until they lost them, shape (n,)."""
        known: Mask = self._padded.values[ids] >= PADDED
        return known

    def take_in(self, ids: Integers, share: Floats, some: Mask, resized: Mask, step: int) -> Mask:
        """Take in shares of zeros; return which tensors have lost them for long enough, shape (n,).

        `some` masks the tensors with enough zeros for a pattern, `resized` those of another size than before.
        """
        padded, gone, lengths = self._padded.values, self._gone.values, self._lengths.values
        none = share == 0
        known = padded[ids] >= PADDED
        begins = known & none & (gone[ids] == 0)
        self._since.values[ids[begins]] = step
        lengths[ids] = np.where(begins, 0, lengths[ids] + (known & none & resized))
        gone[ids] = np.where(known & none, gone[ids] + 1, 0)
        came_back = known & ~none & (self._since.values[ids] > self._before.values[ids])
        padded[ids] = np.where(some & ~came_back, padded[ids] + 1, np.where(known & none, padded[ids], 0))
        self._before.values[ids[~none]] = step
        fresh = padded[ids] <= 1
        least, most = np.where(fresh, np.inf, self._least.values[ids]), np.where(fresh, 0.0, self._most.values[ids])
        self._least.values[ids] = np.where(some, np.minimum(least, share), least)
        self._most.values[ids] = np.where(some, np.maximum(most, share), most)
        lost: Mask = (gone[ids] >= GONE) & (lengths[ids] >= LENGTHS)
        padded[ids[lost]] = gone[ids[lost]] = 0
        return lost

    def told(self, series_id: int) -> tuple[float, int, int]:
        """Return the usual share of zeros, the first step without them, and the last one with them."""
        usual = float(self._least.values[series_id] + self._most.values[series_id]) / 2
        return usual, int(self._since.values[series_id]), int(self._before.values[series_id])
