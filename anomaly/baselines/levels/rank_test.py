"""Whether the newest values of a series are another level than those before: by their order, and by their swings."""

from typing import Final

import numpy as np

from trainsentry.anomaly.series_arrays import Floats

NEW: Final = 8
OLD: Final = 40
"""Values that are compared with those before them: a spike of a healthy run is over after a few steps."""

LEAST_SHARE: Final = 0.975
"""Least share of the pairs of a new and an old value in which the new one is larger. In clean runs of supervised models
the loss came to 0.89 beside a rise of 15 %, in Q-learning to 0.93; policy gradients, whose losses cross zero, exceed
it."""


def is_another_level(values: Floats, least_change: float, least_distance: float, *, falls: bool) -> bool:
    """Return whether the newest of `OLD` + `NEW` logarithms are a higher level than those before.

    The medians must differ by `least_change`, nearly all pairs must be in this order, and the new values must be beyond
    the swings of the old ones by `least_distance`; `falls` as in `distance_in_swings`.
    """
    old, new = values[:OLD], values[OLD:]
    if np.median(new) - np.median(old) < least_change or share_above(old, new) < LEAST_SHARE:
        return False
    return distance_in_swings(old, new, falls=falls) >= least_distance


def share_above(old: Floats, new: Floats) -> float:
    """Return the share of the pairs of a new and an old value in which the new one is larger.

    It asks for no distribution. (Mann and Whitney, "On a test of whether one of two random variables is stochastically
    larger than the other", 1947. Of 8 and 40 equally distributed values it is 0.975 in one of five million cases.)

    >>> share_above(np.array([1.0, 2.0]), np.array([1.5, 3.0]))
    0.75
    """
    return float((new[:, None] > old).mean())


def distance_in_swings(old: Floats, new: Floats, *, falls: bool) -> float:
    """Return how far the median of `new` lies above those of the `OLD` values by eight, in the widths that these span.

    Values of one rollout, or of one curriculum, are alike, so that eight of them are no eight independent ones.
    `falls`: a fall is taken out of the old ones. All values are logarithms; Inf where the old ones span nothing.
    """
    usual = np.median(old.reshape(-1, NEW), axis=1)
    if falls:
        usual = _without_fall(usual)
    above, width = float(np.median(new) - usual.max()), float(np.ptp(usual))
    return above / width if width else np.inf * np.sign(above)


def _without_fall(levels: Floats) -> Floats:
    """Return levels in their order as they would be had the series been at its newest level all along, shape (n,).

    What falls spans a wide range without any noise. Its fall is the median of the slopes between all pairs (Sen,
    "Estimates of the regression coefficient based on Kendall's tau", 1968); a rise is no trend to rely on.
    """
    later, earlier = np.tril_indices(len(levels), -1)
    fall = min(float(np.median((levels[later] - levels[earlier]) / (later - earlier))), 0.0)
    found: Floats = levels + fall * np.arange(len(levels) - 1, -1, -1)
    return found


def first_above(values: Floats) -> int:
    """Return the place of the first of the higher values, of `OLD` + `NEW` logarithms: where the gap is widest.

    Values just before it may be high by chance; one that fell has been as high as now long before.
    """
    places = range(OLD - NEW, OLD + NEW - 2)
    return max(places, key=lambda i: float(values[i:].min() - values[i - 2 * NEW : i].max()))
