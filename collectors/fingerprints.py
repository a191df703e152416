"""Numbers by which the contents of tensors are told apart, from the rows of a record."""

from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.statistics import VALUE


def fingerprints(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return a fingerprint of each row's tensor, of shape (n,): of its bits where it is known, else of its statistics.

    Statistics are sums in float64, which the change of a single bit moves.
    """
    bits = values[:, VALUE]
    words = np.ascontiguousarray(values[:, :VALUE]).view(np.int64)
    mixed = (words * _MIX).sum(axis=1)
    return np.where(np.isfinite(bits), np.nan_to_num(bits).astype(np.int64), mixed ^ (mixed >> 29))


_MIX: Final = np.arange(1, 2 * VALUE, 2, dtype=np.int64) * np.int64(0x1E3779B97F4A7C15)
