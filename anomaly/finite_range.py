"""Ranges of the floating dtypes, without any framework."""

from typing import Final

LARGEST: Final = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
}
"""Largest finite value by dtype name. Eight-bit floats are missing: their scaling makes use of the edge."""

FLOAT16_EDGE: Final = 0.5
"""Share of float16's largest value from which on it is at the edge: one doubling away from Inf."""


def edge(dtype: str) -> float:
    """Return the magnitude from which on a value of this dtype is about to overflow; Inf for other dtypes.

    float16 works close to its limits, so its edge is half its largest value. The others never come near: a
    value whose square leaves the range makes the next variance, norm or product overflow.

    >>> edge("float16"), f"{edge('float32'):.2g}", edge("int64")
    (32752.0, '1.8e+19', inf)
    """
    largest = LARGEST.get(dtype)
    if largest is None:
        return float("inf")
    return largest * FLOAT16_EDGE if dtype == "float16" else float(largest**0.5)
