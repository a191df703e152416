"""Statistics of tensors: on the host read in place, on an accelerator by operations that run there.

MindSpore is asynchronous on the CPU too. Callers wait (`runtime.wait`) before they read on the host, so that an error
of a user's operation is not taken for the monitor's.
"""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, mint, ops
from mindspore import dtype as mstype

from trainsentry.collectors.statistics import row_of_array

try:
    from trainsentry.collectors.native import host_rows
except ImportError:  # built without a compiler
    host_rows = None  # type: ignore[assignment]

_EMPTY: Final = (math.nan, math.nan, math.nan, 0.0, 0.0, 0.0, math.nan, math.nan)

KINDS: Final[dict[str, int]] = (
    {}
    if host_rows is None
    else {
        "float32": host_rows.FLOAT32,
        "bfloat16": host_rows.BFLOAT16,
        "float16": host_rows.FLOAT16,
        "float64": host_rows.FLOAT64,
    }
)
"""Dtypes that the compiled kernel reads; empty without the kernel."""


def dtype_of(tensor: Tensor) -> str:
    """Return a tensor's dtype without the framework's name, such as `float32`."""
    return str(tensor.dtype).lower()


def read(tensor: Tensor, eps: float, row: int, counts: int = 0, scale: float = 1.0) -> bool:
    """Write the statistics of a dense tensor to the COLUMNS doubles at address `row`; False when it cannot be read.

    The tensor times `scale` is added to the counters at address `counts`, unless that is 0. The memory is read without
    a copy; asking for a parameter's address costs a third of a microsecond.
    """
    kind = KINDS.get(dtype_of(tensor))
    if kind is None or not tensor.size or not tensor.is_contiguous():
        return False
    host_rows.read(tensor.data_ptr(), tensor.size, kind, eps, row, 0, 1, counts, scale)
    return True


def row_of(tensor: Tensor, eps: float) -> npt.NDArray[np.float64]:
    """Return the statistics of any tensor, shape (COLUMNS,)."""
    return row_of_values(as_float(array_of(tensor)), eps)


def row_of_values(array: npt.NDArray[Any], eps: float) -> npt.NDArray[np.float64]:
    """Return the statistics of a floating point array, shape (COLUMNS,)."""
    row = np.asarray(_EMPTY)
    if array.size == 0:
        return row
    kind = KINDS.get(str(array.dtype))
    if kind is None:
        return row_of_array(array, eps)
    dense = np.ascontiguousarray(array)
    host_rows.read(dense.ctypes.data, dense.size, kind, eps, row.ctypes.data, 0, 1)
    return row


def array_of(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's values, possibly the tensor's own memory; bfloat16, which NumPy lacks, as float32."""
    if dtype_of(tensor) == "bfloat16":
        bits = np.ascontiguousarray(tensor.asnumpy()).view(np.uint16)
        wide: npt.NDArray[Any] = (bits.astype(np.uint32) << 16).view(np.float32)
        return wide.reshape([int(n) for n in tensor.shape])
    array: npt.NDArray[Any] = tensor.asnumpy()
    return array


def as_float(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array in floating point; of a complex one, the magnitudes."""
    if np.iscomplexobj(array):
        magnitudes: npt.NDArray[Any] = np.abs(array.astype(np.complex128))
        return magnitudes
    return array if array.dtype.kind == "f" else array.astype(np.float64)


def device_row(x: Tensor, eps: float) -> Tensor:
    """Return the statistics of a tensor as a row on its device: float32 of shape (COLUMNS,), the last one NaN.

    The norm is scaled by the largest element, so that its square does not overflow.
    """
    wide = ops.cast(x, mstype.float32).reshape((-1,))
    nan = Tensor(float("nan"), mstype.float32)
    if not x.size:
        return ops.stack([nan, nan, nan, *[Tensor(0.0, mstype.float32)] * 3, nan, nan])
    infinity = Tensor(float("inf"), mstype.float32)
    nans, infs = ops.isnan(wide), ops.isinf(wide)
    finite = ops.logical_not(ops.logical_or(nans, infs))
    count = ops.cast(finite, mstype.float32).sum()
    filled = mint.where(finite, wide, ops.zeros_like(wide))
    low = mint.where(finite, wide, infinity).min()
    high = mint.where(finite, wide, -infinity).max()
    largest = filled.abs().max()
    scale = mint.where(largest > 0, largest, ops.ones_like(largest))
    scaled = filled / scale
    mean = mint.where(count > 0, scale * (scaled.sum() / count), nan)
    norm = scale * ops.sqrt((scaled * scaled).sum())
    some = count > 0
    zeros = ops.cast(wide.abs() <= eps, mstype.float32).sum() / wide.size
    numbers = [mint.where(some, low, nan), mint.where(some, high, nan), mean, norm]
    counts = [ops.cast(nans, mstype.float32).sum(), ops.cast(infs, mstype.float32).sum()]
    return ops.stack([*numbers, *counts, zeros, nan])


def device_pair_row(first: Tensor, second: Tensor) -> Tensor:
    """Return how two tensors of one shape point as a row on their device: float32 of shape (COLUMNS,).

    Both are divided by their largest elements, so that no square overflows.
    """
    a, b = (_largest_is_one(ops.cast(x, mstype.float32).reshape((-1,))) for x in (first, second))
    nan, none = Tensor(float("nan"), mstype.float32), Tensor(0.0, mstype.float32)
    if not first.size:
        return ops.stack([nan, nan, nan, none, none, none, nan, nan])
    share = (mint.sign(a) * mint.sign(b) + 1).mean() / 2
    length = ops.sqrt((a * a).sum()) * ops.sqrt((b * b).sum())
    cosine = mint.where(length > 0, (a * b).sum() / length, nan)
    return ops.stack([share, share, share, share, none, none, ops.cast(share == 0, mstype.float32), cosine])


def _largest_is_one(x: Tensor) -> Tensor:
    """Return a tensor divided by its largest magnitude; zeros as they are."""
    largest = x.abs().max() if x.size else Tensor(0.0, mstype.float32)
    return x / mint.where(largest > 0, largest, ops.ones_like(largest))
