"""Compares two results of a call by msprobe's measure, over all of their elements, with NaN and Inf, on the host."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from trainsentry.collectors.calls.benchmark_task import plain_dtype
from trainsentry.collectors.calls.free_benchmark import (
    BACKWARD_SMALL,
    CHUNK,
    CPU_BALANCE,
    CPU_RATIOS,
    NAN,
    NO_CHANGE,
    NOISE,
    SYMBOL_FLIPPING,
    ResultDifference,
)
from trainsentry.collectors.mindspore.rows.tensor_statistics import array_of

Array = NDArray[Any]


def pairs(first: Any, second: Any, *, integers: bool) -> list[tuple[int, Tensor, Tensor]]:
    """Return the comparable tensors of two flat lists of results, with their numbers."""
    found = []
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        wanted = "Float" in str(one.dtype) or "Complex" in str(one.dtype) or integers
        if wanted and one.shape == other.shape and one.size:
            found.append((index, one, other))
    return found


def difference(mode: str, stage: str, original: Tensor, changed: Tensor) -> ResultDifference:
    """Return how far two results are apart.

    The ratio is that of the larger to the smaller absolute value, both at least some smallest value. Two results of
    opposite signs are `symbol_flipping`; where only one is NaN they are `nan`; equal infinities are equal.
    """
    small = BACKWARD_SMALL
    if mode == NO_CHANGE:
        small = 0.0
    elif stage != "backward":
        small = math.sqrt(NOISE.get(plain_dtype(str(original.dtype)), NOISE["float32"]))
    worst, word = 1.0, ""
    for a, b in _chunks(original, changed):
        ratio, found = _of_chunk(a, b, small)
        worst, word = max(worst, ratio), max(word, found, key=(("", SYMBOL_FLIPPING, NAN)).index)
    return ResultDifference(worst, word)


def _chunks(one: Tensor, other: Tensor) -> Iterator[tuple[Array, Array]]:
    """Yield both tensors in float64, piece by piece; a complex element is two numbers."""
    a, b = (_real(array_of(tensor)) for tensor in (one, other))
    for start in range(0, a.size, CHUNK):
        yield a[start : start + CHUNK].astype(np.float64), b[start : start + CHUNK].astype(np.float64)


def _real(array: Array) -> Array:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


def _of_chunk(a: Array, b: Array, small: float) -> tuple[float, str]:
    unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
    a, b = a[unequal], b[unequal]
    if not a.size:
        return 1.0, ""
    if np.isnan(a).any() or np.isnan(b).any():
        return math.inf, NAN
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        if (a * b < -small * small).any():
            return math.inf, SYMBOL_FLIPPING
        one, other = np.maximum(np.abs(a), small), np.maximum(np.abs(b), small)
        ratio = float((np.maximum(one, other) / np.minimum(one, other)).max())
    # Small values of opposite signs have the ratio 1, two unequal values with no smallest one at least some ratio.
    return max(ratio, math.nextafter(1.0, 2.0) if small == 0.0 else 1.0), ""


def agrees_with_cpu(device: Tensor, cpu: Tensor) -> tuple[bool, ResultDifference]:
    """Return whether a device's result is as near to the CPU's as its dtype allows, and the largest relative error."""
    allowed = CPU_RATIOS.get(plain_dtype(str(device.dtype)), CPU_RATIOS["float32"])
    worst, balance, count, word = 0.0, 0.0, 0, ""
    for one, other in _chunks(device, cpu):
        if (np.isnan(one) != np.isnan(other)).any():
            word = NAN
        compared = (one != other) & ~(np.isnan(one) | np.isnan(other))
        count += one.size
        with np.errstate(invalid="ignore"):
            error = (one[compared] - other[compared]) / np.maximum(np.abs(other[compared]), 1.0)
        if error.size:
            error = np.nan_to_num(error, nan=math.inf, posinf=math.inf, neginf=-math.inf)
            worst = max(worst, float(np.abs(error).max()))
            balance += float(error.sum())
    agrees = not word and worst <= allowed and abs(balance) / max(count, 1) <= CPU_BALANCE
    return agrees, ResultDifference(1.0 + worst, word)
