"""How far out each row is: jumps by their size, slow changes by a cumulative sum."""

from typing import Any, Final

import numpy as np

from trainsentry.anomaly.baseline import DOWN, UP
from trainsentry.anomaly.features import FEATURES, SIZES, Floats

DRIFT_SLACK: Final = 1.5
DRIFT_CLIP: Final = 8.0
DRIFT_LEAST: Final = 12.0
"""Of the cumulative test: deviations a sample that are no drift, deviations that count of one sample, and the sum from
which on it counts: four samples in a row that are far out. (Page, "Continuous inspection schemes", 1954.)"""

DRIFT_RATIO: Final = 0.7
"""Least change of a size that is called a drift, in log units: a factor of two."""


def spike_scores(distance: Floats, jump: Floats, unit: Floats, least: Floats) -> tuple[Floats, Any]:
    """Return the score of each row and its feature; few rows have one.

    A trend leads away from the centre too; only a jump leads away from the sample before.
    """
    nearer = np.minimum(np.abs(distance), np.abs(jump))
    score: Floats = np.zeros(len(nearer))
    feature = np.zeros(len(nearer), np.intp)
    hits = np.flatnonzero((distance * jump > 0) & (nearer >= least))
    rows = _distinct(hits // len(FEATURES))
    each = np.zeros((len(rows), len(FEATURES)))
    each[np.searchsorted(rows, hits // len(FEATURES)), hits % len(FEATURES)] = (nearer.ravel() / unit.ravel())[hits]
    feature[rows] = each.argmax(axis=1)
    score[rows] = each.max(axis=1, initial=0.0)
    return score, feature


def drift_scores(state: Floats, distance: Floats, unit: Floats, may_fall: Any) -> Floats:
    """Carry the cumulative sums on; return those that count. A row that `may_fall` does not drift by falling."""
    size = distance[:, :SIZES]
    z = size / unit[:, :SIZES]
    np.clip(z, -DRIFT_CLIP, DRIFT_CLIP, out=z)
    found: Floats = np.zeros(len(size))
    for sums, sign in ((state[UP, :, :SIZES], 1), (state[DOWN, :, :SIZES], -1)):
        now = sums + z if sign > 0 else sums - z  # in one piece of memory: the sums are strided
        now -= DRIFT_SLACK
        np.maximum(now, 0.0, out=now)
        sums[...] = now
        hits = np.flatnonzero(now >= DRIFT_LEAST)
        hits = hits[sign * size[hits // SIZES, hits % SIZES] >= DRIFT_RATIO]
        hits = hits if sign > 0 else hits[~may_fall[hits // SIZES]]
        np.maximum.at(found, hits // SIZES, now.ravel()[hits])
    return found


def medians(lines: Floats) -> Floats:
    """Return the median of each line; `np.median` looks for NaN besides, and there is none."""
    middle = [(lines.shape[1] - 1) // 2, lines.shape[1] // 2]
    found: Floats = np.partition(lines, middle, axis=1)[:, middle].mean(axis=1)
    return found


def _distinct(numbers: Any) -> Any:
    """Return the distinct ones of ascending numbers."""
    return numbers[np.append(True, np.diff(numbers) > 0)] if len(numbers) else numbers
