"""How two tensors of one shape point: the cosine of the angle between them, and the share of equal signs.

Every faster path (host, kernels, plain operations) is tested against `reference`.
"""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.statistics import COLUMNS, VALUE

ALIGNMENT: Final = "alignment"
"""The name of the cosine of a gradient and its first moment, among the configured statistics and in files."""

FIRST_MOMENTS: Final = ("exp_avg", "momentum_buffer", "moment1", "moments1", "moments", "m")
"""The names of an optimizer's running sum or average of gradients, in torch and in MindSpore."""


def reference(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[float, float]:
    """Return the cosine of two arrays of one shape, and (1 + mean of sign · sign) / 2, computed in float64.

    The cosine is NaN where one of the arrays is all zero, or a sum is not finite. NaN has no sign, as 0 has none.

    >>> reference([1.0, 2.0, 0.0], [-1.0, -2.0, 5.0])[1].__round__(3)
    0.167
    """
    a, b = np.asarray(first, np.float64).reshape(-1), np.asarray(second, np.float64).reshape(-1)
    if not a.size:
        return math.nan, math.nan
    with np.errstate(all="ignore"):
        cosine = float(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)))
        agree = np.nan_to_num(np.sign(a)) * np.nan_to_num(np.sign(b))
    share = float((1 + agree.mean()) / 2)
    return (max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else math.nan), share


def row_of_pair(first: npt.ArrayLike, second: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return the row of two arrays, shape (COLUMNS,): the statistics of the share, and the cosine as the value."""
    cosine, share = reference(first, second)
    row = np.zeros(COLUMNS)
    row[:3] = share
    row[3] = 0.0 if math.isnan(share) else share
    row[6] = math.nan if math.isnan(share) else float(share == 0.0)
    row[VALUE] = cosine
    return row
