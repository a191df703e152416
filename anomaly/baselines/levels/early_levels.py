"""Finds what enters or leaves a module and has another level, where few samples are known: far apart, and twice."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.baselines.levels.recent_range import FEWEST, WAIT, RecentRange
from trainsentry.anomaly.features import MEAN_FEATURE, SIZES
from trainsentry.anomaly.series_arrays import Floats, Mask, rows_where

FEWEST_EARLY: Final = 6
TWICE: Final = 2
"""Samples that give the range, and newest ones that must lie beyond it."""

SPAN: Final = 60
"""Steps from the first sample to the newest: samples of steps in a row are alike, and a young model changes fast."""

FAR: Final = 6.0
FAR_BESIDE_LOSS: Final = 2.5
"""Least distance of a size from the range, in its widths; and that of a size, or of a mean, where the loss is worse
since. In a hundred healthy runs of six models it came to 2.7 with six samples and to 1.5 with eight; of 160 practices,
the means of three adversaries' outputs to 5.7, and nothing else that nobody had changed beyond 3.2."""

FOLLOWED: Final = SIZES + 1
"""The first features, those of sizes and the mean: of zeros there is a rule that knows their pattern."""

Beyond = tuple[int, float, float]
"""How a series is beyond its range: the feature, its middle before, and the distance in widths."""


def early_levels(
    known: RecentRange, ids: Any, followed: Mask, narrowest: Floats, is_worse: Callable[[int, int], bool]
) -> dict[int, Beyond]:
    """Return the places in `ids` of series far beyond their short past, of those that the mask `followed` names.

    `narrowest` are the least widths, shape (features, n). `is_worse` says whether the loss is higher from some step on,
    of a first and a last one.
    """
    taken, span = known.taken[ids], known.steps[-1, ids] - known.begun[ids]
    is_early = (taken >= FEWEST_EARLY + TWICE) & (taken < FEWEST + WAIT) & (span >= SPAN) & followed
    places = rows_where(is_early)
    if not len(places):
        return {}
    of = ids[places]
    low, high, newest = known.low[:FOLLOWED, of], known.high[:FOLLOWED, of], known.newest[:, :FOLLOWED, of]
    low, high = np.fmin(low, newest[0]), np.fmax(high, newest[0])  # what is not in the range yet
    width = np.maximum(high - low, narrowest[:FOLLOWED, places])
    with np.errstate(invalid="ignore"):
        rise, fall = newest[1:].min(axis=0) - high, low - newest[1:].max(axis=0)
        distance = np.nan_to_num(np.fmax(rise, fall) / width, posinf=0.0, neginf=0.0)
    found = {}
    for i in rows_where(distance.max(axis=0) >= FAR_BESIDE_LOSS).tolist():
        feature = int(distance[:, i].argmax())
        apart = float(distance[feature, i])
        is_far = apart >= FAR and feature != MEAN_FEATURE
        clean, beyond = (int(step) for step in known.steps[WAIT - TWICE :, of[i]][:2])
        if is_far or is_worse(clean + 1, beyond):
            found[int(places[i])] = feature, float(low[feature, i] + high[feature, i]) / 2, apart
    return found
