"""The statistics of a tensor: what each one means, once, in NumPy.

Every faster path (host, device, later fused kernels) is tested against `reference`.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

STATISTICS: Final = ("min", "max", "mean", "norm", "nans", "infs", "zeros")
"""Names of the statistics, in the order of a record's columns."""

MIN, MAX, MEAN, NORM, NANS, INFS, ZEROS, VALUE = range(8)
COLUMNS: Final = 8
"""Columns of a record: the seven statistics and `VALUE`.

`VALUE` holds the ratio ‖Δ‖/‖w‖ of an update, the value of a scalar, and of any other tensor a fingerprint of its bits
(a whole number below 2^53: XOR and sum of its words, folded), or NaN where none was made.
"""

COUNTS: Final = frozenset({"nans", "infs"})
"""Statistics that are whole numbers."""


def reference(values: npt.ArrayLike, eps: float = 0.0) -> dict[str, float]:
    """Return the seven statistics of `values`, computed in float64.

    - `nans`, `infs`: how many elements are NaN, and how many are +Inf or -Inf.
    - `min`, `max`, `mean`: over the finite elements; NaN when there is none.
    - `norm`: L2 norm of the finite elements, scaled so that it does not overflow; 0 when there is none.
    - `zeros`: share of all elements with |x| <= `eps`; NaN for an empty tensor.

    Integers and bool count as numbers. An element of a complex tensor counts by its magnitude, and is NaN or
    Inf when a part of it is.

    >>> reference([3.0, -4.0, float("nan")])["norm"]
    5.0
    """
    array = np.asarray(values)
    wide = np.abs(array.astype(np.complex128)) if np.iscomplexobj(array) else array.astype(np.float64)
    nans, infs = np.isnan(wide), np.isinf(wide)
    finite = wide[~(nans | infs)]
    size = wide.size
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    scale = largest or 1.0
    with np.errstate(under="ignore"):
        scaled = finite / scale
        norm = scale * float(np.sqrt(np.sum(scaled * scaled)))
    return {
        "min": float(finite.min()) if finite.size else np.nan,
        "max": float(finite.max()) if finite.size else np.nan,
        "mean": scale * float(np.sum(scaled)) / finite.size if finite.size else np.nan,
        "norm": norm,
        "nans": float(np.count_nonzero(nans)),
        "infs": float(np.count_nonzero(infs)),
        "zeros": float(np.count_nonzero(np.abs(wide) <= eps)) / size if size else np.nan,
    }
