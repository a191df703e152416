"""Whether batches come in groups that have levels of their own, as all updates of one rollout do."""

import functools
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.series_arrays import Floats

GROUP: Final = 8
"""Batches in a row whose mean is taken: fewer than share a rollout where minibatches are drawn from it in epochs."""

SAMPLES: Final = 512
FEWEST: Final = 192
"""Batches that are compared, at most and at least: several rollouts of 32 updates each in either half."""

RECURRING: Final = 1.5
"""Ratio of variances from which levels recur, in both halves of the batches. Of 2,000 samples of independent batches
(normal, lognormal, of two kinds) two came to it with 192 and 256 of them, none with more; of samples with one glitch of
3 to 100 deviations, which begins and ends anywhere, 3 in a hundred with 192 and 1 with 512. Rollouts of 32 updates
(PPO, 5 seeds) gave 1.6 to 7.7 from the 400th batch on."""

RECURS_STILL: Final = 1.2
"""The same where they did at the measurement before: rollouts may be alike for a while."""

FAR: Final = 5.0
"""Deviations, by the median, beyond which a batch counts as that far away."""

_OF_NORMAL: Final = 1.4826
"""Ratio of a normal distribution's deviation to its median absolute one."""


def recurring_levels(values: Floats) -> float:
    """Return the smaller ratio of variances of the two halves of the newest values; 0 where there are too few.

    What happens once, as a glitch of some batches or a line that bends, lies in one half, or is one shift in each.
    """
    used = values[-SAMPLES:]
    if len(used) < FEWEST:
        return 0.0
    half = len(used) // 2
    return min(variance_ratio(used[:half]), variance_ratio(used[half:]))


def variance_ratio(values: Floats) -> float:
    """Return how much more the means of groups vary than batches within them would make them; 1 for independent ones.

    The F ratio of a one-way analysis of variance (Fisher, "Statistical Methods for Research Workers", 1925, chapter
    VII) with four exceptions, which are no levels: a line and one shift are taken out of the means, and with them the
    mean that is farthest away, in which the shift may lie; batches that are far away are brought near.

    >>> levels = np.repeat([1.0, 4.0, 2.0, 6.0, 3.0, 5.0, 1.0, 4.0], 32)
    >>> swings = np.tile([-0.5, 0.5], 128)
    >>> variance_ratio(levels + swings) > 20, variance_ratio(swings) < 1
    (True, True)
    """
    count = len(values) // GROUP
    used = values[len(values) - count * GROUP :]
    middle = np.median(used)
    far = FAR * _OF_NORMAL * float(np.median(np.abs(used - middle)))
    groups = np.clip(used, middle - far, middle + far).reshape(count, GROUP)
    within = float(groups.var(axis=1, ddof=1).mean())
    if not within > 0:
        return 0.0
    line, shifts = _line_and_shifts(count)
    means = groups.mean(axis=1)
    means = means - means.mean()
    means -= (means @ line) * line
    gains = shifts @ means
    first = int(np.abs(gains).argmax())
    squares = (means - gains[first] * shifts[first]) ** 2
    return GROUP * float(squares.sum() - squares.max()) / (count - 4) / within


@functools.cache
def _line_and_shifts(count: int) -> tuple[Any, Any]:
    """Return the line, shape (count,), and a shift before each group, shape (count - 1, count), of length 1 each.

    The shifts are at right angles to the line and to the mean.
    """
    line = np.arange(count) - (count - 1) / 2
    line /= np.linalg.norm(line)
    shifts = (np.arange(count) >= np.arange(1, count)[:, None]).astype(float)
    shifts -= shifts.mean(axis=1, keepdims=True)
    shifts -= np.outer(shifts @ line, line)
    return line, shifts / np.linalg.norm(shifts, axis=1, keepdims=True)
