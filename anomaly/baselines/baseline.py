"""What each series looks like while it is healthy, in a few numbers a feature."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.features import FEATURES, Floats

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
"""Scales by which one sample may pull a location (ψ of Huber 1964)."""

CLIP_SCALE: Final = 4.0
USUAL: Final = 0.798
"""Scales that count of one sample, and the mean of min(|z|, 4) of a normal distribution."""

LEAST_SCALE: Final = 1e-9
"""Below this a series does not move at all; the scale must not vanish, for it grows by factors."""

SIBLINGS: Final = 16
"""Samples that the scale of a kind counts for in that of one of its series."""

NEW_LEVEL_AFTER: Final = 32
"""Outliers in a row after which a series begins anew: what has lasted so long is its level."""


class Baseline:
    """Location and scale of each feature, by series id; outliers and non-finite values never enter.

    `state` has the shape (PARTS, features, series): what is done to all series of a feature is done in one stroke.

    An exponentially weighted Huber estimate: m += γ·clip(r, ±2.5 s), s *= 1 + γ_s·(min(|r|/s, 4) − 0.8), with
    r = y − m; γ and γ_s are 1 over the samples seen while those are few. It keeps two numbers a feature, and one far
    sample moves neither of them far. (Huber, "Robust estimation of a location parameter", 1964.)
    """

    def __init__(self) -> None:
        self.state = np.zeros((PARTS, len(FEATURES), 0), np.float32)
        self.count = np.zeros(0, np.int64)
        self.last_clean = np.full(0, -1, np.int64)
        self.outliers = np.zeros(0, np.int64)

    def grow(self, size: int) -> None:
        """Make room for `size` series."""
        missing = size - len(self.count)
        if missing > 0:
            room = max(missing, len(self.count) // 2)
            more = np.zeros((PARTS, len(FEATURES), room), np.float32)
            self.state = np.concatenate([self.state, more], axis=2)
            self.count = np.append(self.count, np.zeros(room, np.int64))
            self.last_clean = np.append(self.last_clean, np.full(room, -1))
            self.outliers = np.append(self.outliers, np.zeros(room, np.int64))

    def learn(self, ids: Any, state: Floats, features: Floats, step: int) -> None:
        """Take in healthy samples; `state` is that of the ids, as it was taken for judging, and is changed here."""
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
        """Return what is known of series, to be put back."""
        return self.state[:UP, :, ids].copy(), self.count[ids], self.last_clean[ids], self.outliers[ids]

    def put_back(self, ids: Ids, kept: tuple[Any, ...]) -> None:
        """Undo what was learned of series since `copy_of`."""
        self.state[:UP, :, ids], self.count[ids], self.last_clean[ids], self.outliers[ids] = kept

    def note_outliers(self, ids: Ids) -> None:
        """Count outliers in a row; a series that stays away for long begins anew."""
        self.outliers[ids] += 1
        self.begin_anew(ids[self.outliers[ids] >= NEW_LEVEL_AFTER])

    def begin_anew(self, ids: Any) -> None:
        """Forget the level of series: what they did so far says nothing of what comes."""
        self.state[:, :, ids] = 0.0
        self.count[ids] = 0
        self.outliers[ids] = 0

    def saved(self, size: int) -> dict[str, Any]:
        """Return the first `size` series as plain data."""
        return {
            "state": np.nan_to_num(np.moveaxis(self.state[:, :, :size], 2, 0), nan=0.0).tolist(),
            "count": self.count[:size].tolist(),
            "last_clean": self.last_clean[:size].tolist(),
        }

    def adopt(self, series_id: int, saved: dict[str, Any], position: int) -> None:
        """Give a series what was saved of it."""
        self.grow(series_id + 1)
        state = np.asarray(saved["state"][position], np.float32)
        unknown = (state[LOCATION] == 0) & (state[SCALE] == 0) & (state[NEWEST] == 0)  # was saved as zeros
        state[LOCATION, unknown] = state[NEWEST, unknown] = np.nan
        self.state[:, :, series_id] = state
        self.count[series_id] = saved["count"][position]
        self.last_clean[series_id] = saved["last_clean"][position]


def _follow(state: Floats, features: Floats) -> None:
    """Follow series that are known well."""
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
    """Take plain averages of series that are young, or that had nothing to follow so far."""
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
