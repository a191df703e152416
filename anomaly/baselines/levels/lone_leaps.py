"""Gradients that leap alone, for a step or for good, while most others are calm."""

import math
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.baselines.levels.recent_range import RecentRange
from trainsentry.anomaly.features import FEATURES
from trainsentry.anomaly.series_arrays import Floats, rows_where

LEAP: Final = math.log(30)
LEAP_OF_OTHERS: Final = math.log(6)
FEW_LEAPS: Final = 2
SHARE_OF_LEAPS: Final = 0.05
CALM: Final = math.log(2)
"""Factor by which a gradient exceeds its largest of the last 40 samples; the lesser factor that only so many of all
gradients, or such a share of them, may have then, the leaping one included; and the factor of the middle one. In some
two hundred healthy runs (`benchmarks/RESULTS.md`, practices) a gradient alone came to 20; what went further, 143 times
under Lion, had a fifth of the others with it."""

LEAST_LEAPING: Final = math.log(0.1)
"""Log size to which a gradient must leap, beside the middle one: that of a gate all but shut swings far below."""

_NORM: Final = FEATURES.index("norm")


def lone_leaps(of: RecentRange, ids: Any, floor: Floats | None) -> dict[int, float]:
    """Return how far each gradient leaps, in log units, by its place in `ids`; none where many do.

    A leap is one beyond all recent samples and beyond the width of their range. Sizes below the `floor`, shape (n,) or
    None, count as the floor.
    """
    newest, high = of.newest[:, _NORM, ids], of.high[_NORM, ids]
    before = np.fmax(high, np.fmax(newest[0], newest[1]))
    before = before if floor is None else np.fmax(before, floor)
    with np.errstate(invalid="ignore"):
        leap, own = newest[-1] - before, high - of.low[_NORM, ids]
    far = rows_where((leap >= np.fmax(LEAP, own)) & np.isfinite(high))
    alone = (leap > LEAP_OF_OTHERS).sum() <= max(FEW_LEAPS, SHARE_OF_LEAPS * len(leap))
    if not len(far) or not alone or np.nanmedian(leap) > CALM:
        return {}
    least = np.nanmedian(newest[-1]) + LEAST_LEAPING
    return {i: float(leap[i]) for i in far.tolist() if newest[-1, i] >= least}
