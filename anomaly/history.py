"""What each series looked like while it was healthy: a short window of log magnitudes."""

from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.statistics import MAX, MIN, NORM, VALUE

Floats = npt.NDArray[np.float64]

WINDOW: Final = 64
"""Samples kept for each series: long enough for a stable median, short enough to follow a warm-up."""

FEATURES: Final = ("max", "norm")
"""What is followed: the largest magnitude, which one bad element moves, and the norm, which a layer moves."""

NOTHING: Final = 1e-30
"""Magnitudes up to this are as good as zero and not followed: near the smallest floats, noise spans decades."""

NEW_LEVEL_AFTER: Final = 32
"""Outliers in a row after which the series has a new level: half a window."""


class History:
    """Windows of log magnitudes, indexed by series id; outliers and non-finite values never enter."""

    def __init__(self) -> None:
        self.window = np.full((0, len(FEATURES), WINDOW), np.inf)
        self.count = np.zeros(0, np.int64)
        self.last_clean = np.full(0, -1, np.int64)
        self.outliers = np.zeros(0, np.int64)

    def grow(self, size: int) -> None:
        """Make room for `size` series."""
        missing = size - len(self.count)
        if missing > 0:
            room = max(missing, len(self.count) // 2)
            self.window = np.concatenate([self.window, np.full((room, len(FEATURES), WINDOW), np.inf)])
            self.count = np.append(self.count, np.zeros(room, np.int64))
            self.last_clean = np.append(self.last_clean, np.full(room, -1))
            self.outliers = np.append(self.outliers, np.zeros(room, np.int64))

    def centre_and_scale(self, ids: npt.NDArray[np.int32]) -> tuple[Floats, Floats]:
        """Return median and MAD·1.4826 of each feature, of shape (n, features); Inf without history.

        The factor makes the MAD of a normal distribution its standard deviation (Hampel 1974).
        """
        held = np.minimum(self.count[ids], WINDOW)
        window = self.window[ids]
        centre = _median(window, held)
        with np.errstate(invalid="ignore"):
            spread = np.abs(window - centre[:, :, None])
        spread[~np.isfinite(window)] = np.inf
        return centre, 1.4826 * _median(spread, held)

    def newest(self, ids: npt.NDArray[np.int32]) -> Floats:
        """Return the last healthy sample of each feature, of shape (n, features); Inf without one."""
        found: Floats = self.window[ids, :, (self.count[ids] - 1) % WINDOW]
        return found

    def learn(self, ids: npt.NDArray[np.int32], features: Floats, step: int) -> None:
        """Take in healthy samples: `features` of shape (n, features), in log units."""
        if len(ids):
            self.window[ids, :, self.count[ids] % WINDOW] = features
            self.count[ids] += 1
            self.last_clean[ids] = step
            self.outliers[ids] = 0

    def note_outliers(self, ids: npt.NDArray[np.int32]) -> None:
        """Count outliers in a row; a series that stays away for long starts a new window."""
        self.outliers[ids] += 1
        moved = ids[self.outliers[ids] >= NEW_LEVEL_AFTER]
        self.window[moved] = np.inf
        self.count[moved] = 0
        self.outliers[moved] = 0


def log_magnitudes(values: Floats, scalar: npt.NDArray[np.bool_]) -> Floats:
    """Return the features of rows, of shape (n, features): natural logs, NaN where there is nothing to log."""
    largest = np.fmax(np.abs(values[:, MIN]), np.abs(values[:, MAX]))
    norm = values[:, NORM].copy()
    largest[scalar] = norm[scalar] = np.abs(values[scalar, VALUE])
    # A history that lacks one of the two is judged by the other.
    features = np.stack([np.where(np.isnan(largest), norm, largest), np.where(np.isnan(norm), largest, norm)], axis=1)
    features[~(np.isfinite(features) & (features > NOTHING))] = np.nan
    logs: Floats = np.log(features)
    return logs


def _median(values: Floats, held: npt.NDArray[np.int64]) -> Floats:
    """Return medians over the last axis; missing entries are Inf, and `held` counts those that are not."""
    ordered = np.sort(values, axis=-1)
    upper = np.minimum(held // 2, values.shape[-1] - 1)
    lower = np.maximum((held - 1) // 2, 0)
    rows = np.arange(len(held))
    with np.errstate(invalid="ignore"):
        middle: Floats = (ordered[rows, :, lower] + ordered[rows, :, upper]) / 2
    return middle
