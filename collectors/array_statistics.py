"""Statistics of a NumPy array in blocks that stay in the cache: for machines where the compiled kernel is missing."""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.statistics import reference

BLOCK: Final = 65_536
"""Elements that are widened to float64 at a time: half a megabyte."""


def row_of_array(array: npt.NDArray[Any], eps: float = 0.0) -> npt.NDArray[np.float64]:
    """Return the statistics of a floating point array that is not empty, shape (COLUMNS,).

    >>> row_of_array(np.array([3.0, -4.0], np.float32)).tolist()[:4]
    [-4.0, 3.0, -0.5, 5.0]
    """
    flat = array.reshape(-1)
    total = squares = 0.0
    for start in range(0, flat.size, BLOCK):
        wide = flat[start : start + BLOCK].astype(np.float64)
        total += float(wide.sum())
        squares += float(wide @ wide)
    if not 1e-280 < squares < 1e290 or not math.isfinite(total):  # not finite, all zeros, or doubles out of range
        return np.asarray([*reference(flat, eps).values(), math.nan])
    above = np.count_nonzero(flat) if eps == 0.0 else np.count_nonzero(np.abs(flat.astype(np.float64)) > eps)
    zeros = (flat.size - above) / flat.size
    low, high = float(flat.min()), float(flat.max())
    return np.asarray([low, high, total / flat.size, math.sqrt(squares), 0.0, 0.0, zeros, math.nan])
