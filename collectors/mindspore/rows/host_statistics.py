"""Statistics of tensors in host memory, read where they lie.

MindSpore runs behind the program on the CPU too: whoever reads here has waited (`runtime.wait`), so that an error of
an operation of the user's own is not taken for one of ours.
"""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from mindspore import Tensor

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
"""What the compiled kernel reads; empty without it."""


def dtype_of(tensor: Tensor) -> str:
    """Return a tensor's dtype without the framework's name, such as `float32`."""
    return str(tensor.dtype).lower()


def read(tensor: Tensor, eps: float, row: int) -> bool:
    """Write the statistics of a dense tensor to the COLUMNS doubles at address `row`; False when it cannot be read so.

    The memory is read as it lies, without a copy: the parameters' own address costs a third of a microsecond.
    """
    kind = KINDS.get(dtype_of(tensor))
    if kind is None or not tensor.size or not tensor.is_contiguous():
        return False
    host_rows.read(tensor.data_ptr(), tensor.size, kind, eps, row, 0, 1)
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
    """Return a tensor's values; bfloat16, which NumPy does not know, as float32.

    The array may be the tensor's own memory.
    """
    if dtype_of(tensor) == "bfloat16":
        bits = np.ascontiguousarray(tensor.asnumpy()).view(np.uint16)
        wide: npt.NDArray[Any] = (bits.astype(np.uint32) << 16).view(np.float32)
        return wide.reshape([int(n) for n in tensor.shape])
    array: npt.NDArray[Any] = tensor.asnumpy()
    return array


def as_float(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array in floating point; a complex one by its magnitudes."""
    if np.iscomplexobj(array):
        magnitudes: npt.NDArray[Any] = np.abs(array.astype(np.complex128))
        return magnitudes
    return array if array.dtype.kind == "f" else array.astype(np.float64)
