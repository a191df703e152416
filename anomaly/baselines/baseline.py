"""The healthy level and spread of each series, in a few numbers a feature."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.features import FEATURES
from trainsentry.anomaly.series_arrays import Columns, Floats, Integers

Ids = npt.NDArray[np.int32]

LOCATION, SCALE, NEWEST, UP, DOWN = range(5)
PARTS: Final = 5

MEMORY: Final = 24
"""Samples over which a location is an average: long enough to be stable, short enough to follow a warm-up."""

SCALE_MEMORY: Final = 32
"""Samples over which a scale is an average; it needs more of them than a location."""

YOUNG: Final = 25
"""Samples up to which plain averages are taken; a weighted one would still remember its start."""

CLIP: Final = 2.5
"""Clip of one sample's pull on a location, in scales (ψ of Huber 1964)."""

CLIP_SCALE: Final = 4.0
USUAL: Final = 0.798
"""Clip of one sample's pull on a scale, in scales, and the mean of min(|z|, 4) of a normal distribution."""

LEAST_SCALE: Final = 0.01
"""Least scale, in units of the feature, a fifth of the least that is assumed where rows are judged. A scale grows by a
tenth with each sample and bounds how far a location moves: from nothing, as a largest element that stood still for 30
steps leaves it, it would take 200 samples, and a weight that grows slowly since would be far from its usual size."""

GROUP_WEIGHT: Final = 16
"""Weight of the group's scale in that of a young series, in samples."""

NEW_LEVEL_AFTER: Final = 32
"""Outliers in a row after which a series is reset: they are its new level."""


class Baseline:
    """Location and scale of each feature, by series id; outliers and non-finite values never enter.

    `state` has the shape (PARTS, features, series): one array operation treats all series of a feature. `items` are
    the columns over series, or over groups of series.

    An exponentially weighted Huber estimate: m += γ·clip(r, ±2.5 s), s *= 1 + γ_s·(min(|r|/s, 4) − 0.8), with
    r = y − m; γ and γ_s are 1 over the samples seen while those are few. It keeps two numbers a feature, and one far
    sample moves neither of them far. (Huber, "Robust estimation of a location parameter", 1964.)
    """

    def __init__(self, items: Columns[Any]) -> None:
        self._state = items.column(np.float32, shape=(PARTS, len(FEATURES)))
        self._count = items.column(np.int64)
        self._last_clean = items.column(np.int64, -1)
        self._outliers = items.column(np.int64)

    @property
    def state(self) -> npt.NDArray[np.float32]:
        """Location, scale, newest sample and both cumulative sums, shape (PARTS, features, series)."""
        return self._state.values

    @property
    def count(self) -> Integers:
        """Samples learned of each series."""
        return self._count.values

    @property
    def last_clean(self) -> Integers:
        """The last step at which each series was healthy, -1 for never."""
        return self._last_clean.values

    @property
    def outliers(self) -> Integers:
        """Outliers in a row of each series."""
        return self._outliers.values

    def learn(self, ids: Any, state: Floats, features: Floats, step: int) -> None:
        """Learn healthy samples, shape (features, n); `state` is that of the ids, as it was judged; it is updated."""
        held = self.count[ids]
        young = (held < YOUNG) | (np.isnan(state[LOCATION]) & ~np.isnan(features)).any(axis=0)
        if not young.any():
            _follow(state, features)
        else:
            old = ~young
            part = state[:, :, old]
            _follow(part, features[:, old])
            state[:, :, old] = part
            part = state[:, :, young]
            _begin(part, features[:, young], held[young])
            state[:, :, young] = part
        if not isinstance(ids, slice):
            self.state[:, :, ids] = state
        self.count[ids] = held + 1
        self.last_clean[ids] = step
        self.outliers[ids] = 0

    def copy_of(self, ids: Ids) -> tuple[Any, ...]:
        """Return a copy of the state of series, for `put_back`."""
        return self.state[:UP, :, ids].copy(), self.count[ids], self.last_clean[ids], self.outliers[ids]

    def put_back(self, ids: Ids, kept: tuple[Any, ...]) -> None:
        """Undo the learning of series since `copy_of`."""
        self.state[:UP, :, ids], self.count[ids], self.last_clean[ids], self.outliers[ids] = kept

    def note_outliers(self, ids: Ids) -> None:
        """Count outliers in a row; a series whose outliers last is reset."""
        self.outliers[ids] += 1
        self.reset(ids[self.outliers[ids] >= NEW_LEVEL_AFTER])

    def reset(self, ids: Any) -> None:
        """Forget the level of series: a known change makes their past useless."""
        self.state[:, :, ids] = 0.0
        self.count[ids] = 0
        self.outliers[ids] = 0

    def forget(self, ids: Any, feature: int) -> None:
        """Forget one feature of series, and take their next sample as its level."""
        for part in (LOCATION, NEWEST):
            self.state[part, feature, ids] = np.nan

    def saved(self, size: int) -> dict[str, Any]:
        """Return the first `size` series as plain data."""
        return {
            "state": np.nan_to_num(np.moveaxis(self.state[:, :, :size], 2, 0), nan=0.0).tolist(),
            "count": self.count[:size].tolist(),
            "last_clean": self.last_clean[:size].tolist(),
        }

    def adopt(self, series_id: int, saved: dict[str, Any], position: int) -> None:
        """Restore a series from `position` of the saved ones."""
        state = np.asarray(saved["state"][position], np.float32)
        unknown = (state[LOCATION] == 0) & (state[SCALE] == 0) & (state[NEWEST] == 0)  # was saved as zeros
        state[LOCATION, unknown] = state[NEWEST, unknown] = np.nan
        self.state[:, :, series_id] = state
        self.count[series_id] = saved["count"][position]
        self.last_clean[series_id] = saved["last_clean"][position]


def _follow(state: Floats, features: Floats) -> None:
    """Update series with many samples."""
    location, scale = state[LOCATION], state[SCALE]
    residual = features - location
    unknown = np.isnan(residual)
    np.copyto(residual, 0.0, where=unknown)
    np.maximum(scale, LEAST_SCALE, out=scale)
    ratio = np.abs(residual)
    ratio /= scale
    np.minimum(ratio, CLIP_SCALE, out=ratio)
    np.copyto(ratio, USUAL, where=unknown)
    bound = CLIP * scale
    np.clip(residual, -bound, bound, out=residual)
    residual /= MEMORY
    location += residual
    ratio -= USUAL
    ratio /= SCALE_MEMORY
    ratio += 1.0
    scale *= ratio
    np.copyto(state[NEWEST], features, where=~unknown)


def _begin(state: Floats, features: Floats, held: npt.NDArray[np.int64]) -> None:
    """Update young series, and those without a value so far, by plain averages."""
    first = held == 0
    known = ~np.isnan(features)
    location, scale = state[LOCATION], state[SCALE]
    new = known & (np.isnan(location) | first)
    location = np.where(new, features, np.where(first, np.nan, location))
    residual = np.where(known, features - location, 0.0)
    gain = 1.0 / np.clip(held + 1, 1, MEMORY)
    state[LOCATION] = location + gain * np.where(known, residual, 0.0)
    size = np.abs(residual)
    young = scale + (size / USUAL - scale) / np.maximum(held, 1)
    state[SCALE] = np.where(known & ~new, young, np.where(first, 0.0, scale))
    state[NEWEST] = np.where(known, features, np.where(first, np.nan, state[NEWEST]))
