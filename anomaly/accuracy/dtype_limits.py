"""What can be asked of each floating-point dtype: its rounding, and the limits of msprobe's standards."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""The values of a tensor, in float64 whatever their dtype."""


@dataclass(frozen=True)
class DtypeLimits:
    """Limits for a dtype, all without a unit.

    `rounding` is the largest relative error of one rounding. Below `small_value` an error is judged absolutely, against
    `small_error`, else relatively, against `relative_error`. `least_error` is the smallest error that a comparison with
    a benchmark divides by. `mantissa_bits` and `lowest_exponent` give the unit in the last place; `many_ulps` is the
    number of units from which an element counts as wrong.

    Source: `standard_config.py` and `compare_utils.py` of msprobe 26.2, but for `small_error` of the half types, for
    which it has 1e-16: so small that any error exceeds it. The manual of 1.0.3 has 1e-5, next to the 2⁻¹⁶ used here.
    """

    rounding: float
    small_value: float
    small_error: float
    relative_error: float
    least_error: float
    mantissa_bits: int
    lowest_exponent: int
    many_ulps: float


HALF: Final = DtypeLimits(2**-11, 2**-10, 2**-16, 2**-10, 2**-11, 10, -14, 1.0)
BFLOAT16: Final = DtypeLimits(2**-8, 2**-10, 2**-16, 2**-8, 2**-8, 7, -126, 1.0)
SINGLE: Final = DtypeLimits(2**-24, 2**-20, 2**-30, 2**-20, 2**-14, 23, -126, 32.0)

LIMITS: Final = {"float16": HALF, "bfloat16": BFLOAT16, "float32": SINGLE, "complex64": SINGLE}
"""Limits by the name of the dtype without its framework. Others have no better precision to be compared with."""


def limits_of(dtype: str) -> DtypeLimits | None:
    """Return the limits of a dtype such as `torch.float32` or `Float32`; None where there are none.

    >>> limits_of("torch.bfloat16").mantissa_bits, limits_of("torch.float64")
    (7, None)
    """
    return LIMITS.get(dtype.rpartition(".")[2].lower())


def rounded(values: Array, dtype: str) -> Array:
    """Return float64 values as they are after rounding to a dtype.

    >>> rounded(np.array([1.001]), "torch.bfloat16").tolist()
    [1.0]
    """
    limits = limits_of(dtype)
    if limits is None:
        return values
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
        if limits is HALF:
            return values.astype(np.float16).astype(np.float64)
        if limits is not BFLOAT16:
            return single.astype(np.float64)
    bits = single.view(np.uint32)
    even = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    kept = (even & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isfinite(single), kept, single).astype(np.float64)
