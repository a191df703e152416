"""Scores of rows in deviations: jumps by their size, slow changes by a cumulative sum (CUSUM)."""

from typing import Any, Final

import numpy as np

from trainsentry.anomaly.baselines.baseline import DOWN, MEMORY, UP
from trainsentry.anomaly.features import FEATURES, SIZES
from trainsentry.anomaly.series_arrays import Floats, rows_where

OUTLIER: Final = 5.0
"""Deviations above which a sample is an outlier, and not learned."""

DRIFT_SLACK: Final = 1.5
DRIFT_CLIP: Final = 8.0
DRIFT_LEAST: Final = 12.0
"""CUSUM parameters, in deviations: slack per sample, clip per sample, decision threshold (four samples in a row that
are far out). (Page, "Continuous inspection schemes", 1954.)"""

DRIFT_RATIO: Final = 0.7
"""Least change of a size in a drift, in log units: a factor of two."""

TREND: Final = 3.0
"""Power of the number of samples by which a tensor may grow or fall in addition while a model learns: training slows
down in proportion to its age."""


def spike_scores(distance: Floats, jump: Floats, unit: Floats, least: Floats, least_fall: Floats) -> tuple[Floats, Any]:
    """Return the score of each row and its feature; few rows have one.

    A trend leads away from the centre too; only a jump leads away from the sample before. `least` is the least jump of
    each feature, and `least_fall` the least fall of a row's size, in log units.
    """
    nearer = np.minimum(np.abs(distance), np.abs(jump))
    sizes = nearer[:SIZES]
    np.copyto(sizes, 0.0, where=(distance[:SIZES] < 0) & (sizes < least_fall))
    n = nearer.shape[1]
    score: Floats = np.zeros(n)
    feature = np.zeros(n, np.intp)
    hits = rows_where((distance * jump > 0) & (nearer >= least))
    if not len(hits):
        return score, feature
    is_hit = np.zeros(n, bool)
    is_hit[hits % n] = True
    rows = rows_where(is_hit)
    each = np.zeros((len(FEATURES), len(rows)))
    each[hits // n, np.searchsorted(rows, hits % n)] = nearer.flat[hits] / unit.flat[hits]
    feature[rows] = each.argmax(axis=0)
    score[rows] = each.max(axis=0, initial=0.0)
    return score, feature


def drift_scores(state: Floats, distance: Floats, unit: Floats, least: tuple[Floats, Floats]) -> Floats:
    """Update the cumulative sums; return those above the threshold. `least` is the least rise and fall of a size."""
    size = distance[:SIZES]
    z = size / unit[:SIZES]
    np.clip(z, -DRIFT_CLIP, DRIFT_CLIP, out=z)
    found: Floats = np.zeros(size.shape[1])
    n = len(found)
    for part, sign, enough in ((UP, 1, least[0]), (DOWN, -1, least[1])):
        sums = state[part, :SIZES]
        carry = np.add if sign > 0 else np.subtract
        carry(sums, z, out=sums)
        np.subtract(sums, DRIFT_SLACK, out=sums)
        np.maximum(sums, 0.0, out=sums)
        hits = rows_where(sums >= DRIFT_LEAST)
        hits = hits[sign * size.flat[hits] >= enough[hits % n]]
        np.maximum.at(found, hits % n, sums.flat[hits])
    return found


def least_drifts(held: Any, scalar: Any) -> Floats:
    """Return the least change of sizes in a drift, in log units, by the number of samples `held` of each row."""
    found: Floats = _LEAST_DRIFT.take(np.minimum(held, len(_LEAST_DRIFT) - 1))
    found[scalar] = DRIFT_RATIO
    return found


def _least_drift_by_age(oldest: int) -> Floats:
    age = np.maximum(np.arange(oldest), MEMORY + 1)
    found: Floats = (DRIFT_RATIO + TREND * np.log(age / (age - MEMORY))).astype(np.float32)
    return found


_LEAST_DRIFT: Final = _least_drift_by_age(4096)
