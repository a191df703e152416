"""Finds what enters or leaves a module and has another level, where few samples are known: far apart, and twice."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.baselines.levels.recent_range import FEWEST, WAIT, RecentRange
from trainsentry.anomaly.features import SIZES
from trainsentry.anomaly.series_arrays import Floats, Mask, rows_where

FEWEST_EARLY: Final = 6
TWICE: Final = 2
"""Samples that give the range, and newest ones that must lie beyond it."""

SPAN: Final = 60
"""Steps from the first sample to the newest: a young model changes fast. Samples of steps in a row, as after an
incident, are alike: of those, `WAIT` must lie beyond."""

FAR: Final = 6.0
FAR_BESIDE_LOSS: Final = 2.5
"""Least distance of a size from the range, in its widths; and that of a size or a mean, where the loss is worse since.
In a hundred healthy runs of six models it came to 2.7 with six samples, and to 1.5 with eight. Of the 160 practices
where nobody had changed anything, the means of three adversaries' outputs came to 5.7, and all else to 3.2."""

FOLLOWED: Final = SIZES + 1
"""The first features, those of sizes and the mean: of zeros there is a rule that knows their pattern."""

Beyond = tuple[int, float, float, int]
"""How a series is beyond its range: the feature, its middle before, the distance in widths, and which of the newest
samples is the first beyond."""


def early_levels(
    known: RecentRange,
    ids: Any,
    followed: Mask,
    narrowest: Floats,
    is_worse: Callable[[int, int], bool],
    times: float = 1.0,
) -> dict[int, Beyond]:
    """Return the places in `ids` of series far beyond their short past, of those that the mask `followed` names.

    `narrowest` are the least widths, shape (features, n). `is_worse` says whether the loss is higher from some step on,
    of a first and a last one. So many `times` the usual distance is asked for.
    """
    taken, span = known.taken[ids], known.steps[-1, ids] - known.begun[ids]
    is_early = (taken >= FEWEST_EARLY + WAIT) & (taken < FEWEST + WAIT) & (span >= SPAN) & followed
    places = rows_where(is_early & (known.begun[ids] >= 0) & (known.steps[0, ids] >= 0))  # not of an earlier run
    if not len(places):
        return {}
    of, steps = ids[places], known.steps[:, ids[places]]
    is_dense = (steps[-1] - steps[-1 - TWICE]) * (taken[places] - 1) < TWICE * span[places]
    first = np.where(is_dense, 0, WAIT - TWICE)  # the first of the newest samples that must lie beyond
    clean, onset = np.take_along_axis(steps, np.stack((first, first + 1)), axis=0)
    distance, middle = _distances(known, of, narrowest[:, places], is_dense)
    distance /= times
    is_far: Mask = distance[:SIZES].max(axis=0) >= FAR
    may_be: Mask = distance.max(axis=0) >= FAR_BESIDE_LOSS
    found: dict[int, Beyond] = {}
    worse: dict[tuple[int, int], bool] = {}
    for i in rows_where(may_be).tolist():
        between = int(clean[i]) + 1, int(onset[i])
        if between not in worse:
            worse[between] = is_worse(*between)
        if is_far[i] or worse[between]:
            feature = int(distance[: FOLLOWED if worse[between] else SIZES, i].argmax())
            found[int(places[i])] = feature, float(middle[feature, i]), float(distance[feature, i]), int(first[i])
    return found


def _distances(known: RecentRange, of: Any, narrowest: Floats, all_newest: Mask) -> tuple[Floats, Floats]:
    """Return how far the newest samples lie beyond the range, in widths, and its middle; shape (FOLLOWED, n) each.

    `all_newest` masks the series of which the oldest of the newest samples must lie beyond too; else the range has it.
    """
    low, high, newest = known.low[:FOLLOWED, of], known.high[:FOLLOWED, of], known.newest[:, :FOLLOWED, of]
    low = np.where(all_newest, low, np.fmin(low, newest[0]))
    high = np.where(all_newest, high, np.fmax(high, newest[0]))
    width = np.maximum(high - low, narrowest[:FOLLOWED])
    with np.errstate(invalid="ignore"):
        least, most = newest[1:].min(axis=0), newest[1:].max(axis=0)
        least = np.where(all_newest, np.minimum(least, newest[0]), least)
        most = np.where(all_newest, np.maximum(most, newest[0]), most)
        rise, fall = least - high, low - most
        distance: Floats = np.nan_to_num(np.fmax(rise, fall) / width, posinf=0.0, neginf=0.0)
        middle: Floats = (low + high) / 2
    return distance, middle
