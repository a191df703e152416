"""The range of the recent samples of each series, and the newest samples apart from it."""

from typing import Any, Final

import numpy as np

from trainsentry.anomaly.features import FEATURES, SIZES
from trainsentry.anomaly.series_arrays import Floats, Integers, Mask, SeriesArrays, rows_where

WAIT: Final = 3
"""Newest samples, which are compared with the range and not in it yet."""

BLOCK: Final = 8
BLOCKS: Final = 4
FEWEST: Final = BLOCK * BLOCKS
"""The range is that of the last 32 to 40 samples before the newest ones. It is kept as the extremes of blocks of eight,
which take a quarter of the memory of the samples and follow a trend."""


class RecentRange:
    """The least and the largest recent value of each feature, shape (features, series), and the newest samples.

    `newest` has the shape (WAIT, features, series), `steps` the shape (1 + WAIT, series): that of the last sample of
    the range comes first. `taken` counts the samples of each series.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        series, shape = arrays.series, (len(FEATURES),)
        self._low, self._high = (series.column(np.float32, fill, shape=shape) for fill in (np.inf, -np.inf))
        self._block_low, self._block_high = (series.column(np.float32, f, shape=shape) for f in (np.inf, -np.inf))
        self._lows, self._highs = (series.column(np.float32, f, shape=(BLOCKS, *shape)) for f in (np.inf, -np.inf))
        self._newest = series.column(np.float32, np.nan, shape=(WAIT, *shape))
        self._steps = series.column(np.int64, -1, shape=(1 + WAIT,))
        self._taken = series.column(np.int64)
        self._begun = series.column(np.int64, -1)

    @property
    def low(self) -> Floats:
        """Least recent values."""
        return self._low.values

    @property
    def high(self) -> Floats:
        """Largest recent values."""
        return self._high.values

    def moved(self, ids: Any) -> Floats:
        """Return how far the newest sample but one is from the middle of the range, shape (features, n)."""
        with np.errstate(invalid="ignore"):
            found: Floats = self.newest[1][:, ids] - (self.low[:, ids] + self.high[:, ids]) / 2
        return found

    def is_constant(self, ids: Any) -> Mask:
        """Return whether each of some series has had one and the same size, shape (n,)."""
        found: Mask = (self.low[:SIZES, ids] == self.high[:SIZES, ids]).all(axis=0)
        return found

    @property
    def newest(self) -> Floats:
        """The newest samples, the oldest of them first."""
        return self._newest.values

    @property
    def steps(self) -> Integers:
        """The steps of the last sample of the range and of the newest ones."""
        return self._steps.values

    @property
    def taken(self) -> Integers:
        """Samples since the last `reset`."""
        return self._taken.values

    @property
    def begun(self) -> Integers:
        """The step of the first of these samples, -1 where it was in an earlier run."""
        return self._begun.values

    def reset(self, ids: Any) -> None:
        """Forget the past of series."""
        for low, high in ((self._low, self._high), (self._block_low, self._block_high), (self._lows, self._highs)):
            low.values[..., ids], high.values[..., ids] = np.inf, -np.inf
        self.newest[..., ids], self.steps[..., ids], self.taken[ids], self.begun[ids] = np.nan, -1, 0, -1

    def take_in(self, ids: Any, features: Floats, step: int) -> None:
        """Move the oldest of the newest samples into the range, and append a sample of each series."""
        newest, steps, taken = self.newest, self.steps, self.taken[ids]
        self.begun[ids] = np.where(taken == 0, step, self.begun[ids])
        oldest = newest[0][:, ids]  # NaN while there are fewer than three, which no minimum takes
        for low, high in ((self._low, self._high), (self._block_low, self._block_high)):
            low.values[:, ids] = np.fmin(low.values[:, ids], oldest)
            high.values[:, ids] = np.fmax(high.values[:, ids], oldest)
        full = (taken >= WAIT) & ((taken - WAIT + 1) % BLOCK == 0)
        if full.any():
            self._begin_block(ids[full], (taken[full] - WAIT) // BLOCK % BLOCKS)
        newest[:-1, :, ids] = newest[1:, :, ids]
        newest[-1][:, ids] = features
        steps[:-1, ids] = steps[1:, ids]
        steps[-1, ids] = step
        self.taken[ids] = taken + 1

    def _begin_block(self, ids: Any, place: Integers) -> None:
        """Keep the block that is full in the place of the oldest, and begin another."""
        lows, highs, where = self._lows.values, self._highs.values, (place, slice(None), ids)
        lows[where], highs[where] = self._block_low.values[:, ids].T, self._block_high.values[:, ids].T
        self._low.values[:, ids], self._high.values[:, ids] = lows[..., ids].min(axis=0), highs[..., ids].max(axis=0)
        self._block_low.values[:, ids], self._block_high.values[:, ids] = np.inf, -np.inf

    def outside(self, ids: Any) -> Integers:
        """Return the places in `ids` of series whose newest samples all lie beyond the range, on one side."""
        newest = self.newest[:, :, ids]
        beyond = (newest.min(axis=0) > self.high[:, ids]) | (newest.max(axis=0) < self.low[:, ids])
        return rows_where(beyond.any(axis=0) & (self.taken[ids] >= FEWEST + WAIT))

    def saved(self, size: int) -> dict[str, Any]:
        """Return the ranges of the first `size` series as plain data, without their newest samples."""
        low, high = self.low[:, :size].T.tolist(), self.high[:, :size].T.tolist()
        return {"low": low, "high": high, "taken": self.taken[:size].tolist()}

    def adopt(self, series_id: int, saved: dict[str, Any], position: int) -> None:
        """Restore a series from `position` of the saved ones; each of its blocks has the whole range."""
        self.reset(series_id)
        for column, key in ((self._low, "low"), (self._high, "high"), (self._lows, "low"), (self._highs, "high")):
            column.values[..., series_id] = saved[key][position]
        self.taken[series_id] = saved["taken"][position]
