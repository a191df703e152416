"""Computes statistics of tensors in host memory; only this module reads tensor values on the host.

The compiled kernel reads a dense tensor once, by its address, on torch's own OpenMP threads; no torch operation runs.
Any other tensor is first converted to dense floating point. Where there was no compiler, NumPy does the work.
"""

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.histogram import MIDDLE, MOST_ELEMENTS, SLOTS, Counts, counts_of
from trainsentry.collectors.statistics import COLUMNS, row_of_array
from trainsentry.collectors.torch.rows.described_tensors import compiled_read
from trainsentry.collectors.torch.rows.local_tensor import PLAIN, address_in_memory


def parallel_region() -> int:
    """Return the address of `GOMP_parallel` in the OpenMP runtime that torch has loaded, 0 when it is unknown.

    GNU's runtime has it; Intel's and LLVM's have it for code of GNU compilers. It wakes torch's own workers of the
    calling thread and creates no other pool.
    """
    if sys.platform != "linux" or "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return 0
    try:
        entry = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(entry, ctypes.c_void_p).value or 0


try:
    from trainsentry.collectors.native import host_rows
except ImportError:  # built without a compiler
    host_rows = None  # type: ignore[assignment]

_NAN: Final = math.nan
_EMPTY: Final = (_NAN, _NAN, _NAN, 0.0, 0.0, 0.0, _NAN, _NAN)
_READ: Final = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""Dtypes that are read directly; others are widened first."""

PARALLEL: Final = parallel_region()
"""Address by which the kernel runs on torch's threads, which share the reading of large tensors."""

KINDS: Final[dict[torch.dtype, int]] = (
    {}
    if host_rows is None
    else {
        torch.float32: host_rows.FLOAT32,
        torch.bfloat16: host_rows.BFLOAT16,
        torch.float16: host_rows.FLOAT16,
        torch.float64: host_rows.FLOAT64,
    }
)
"""Dtypes that the compiled kernel reads; empty without the kernel."""


def address_of(x: Tensor) -> int:
    """Return the address of a dense CPU tensor that the kernel can read in place, else 0."""
    if type(x) not in PLAIN or not x.is_cpu or x.dtype not in KINDS:
        return 0
    try:
        return 0 if not x.is_contiguous() or x.is_neg() or x.is_nested else address_in_memory(x)
    except RuntimeError:  # sparse tensors and values inside a functorch transform have no address
        return 0


def read_at(address: int, x: Tensor, eps: float, row: int, counts: int = 0) -> None:
    """Write the statistics of tensor `x` at `address` to the COLUMNS doubles at address `row`.

    Its values are added to the SLOTS counters at address `counts`, unless that is 0.
    """
    size = x.numel()
    counts = counts if size <= MOST_ELEMENTS else 0
    host_rows.read(address, size, KINDS[x.dtype], eps, row, PARALLEL, _threads_for(size), counts, 1.0)


def read_many_at(
    addresses: list[int], tensors: Sequence[Tensor], eps: float, rows: int, counts: int = 0, scale: float = 1.0
) -> None:
    """Write the statistics of tensor i at `addresses[i]` to row i of the rows at address `rows`.

    Its values times `scale` are added to the SLOTS counters number i at address `counts`, unless that is 0.
    """
    sizes, kinds = [x.numel() for x in tensors], [KINDS[x.dtype] for x in tensors]
    largest = max(sizes, default=0)
    counts = counts if largest <= MOST_ELEMENTS else 0
    host_rows.read_many(addresses, sizes, kinds, eps, rows, PARALLEL, _threads_for(largest), counts, scale)


def read_described_at(
    description: Any, largest: int, tensors: Sequence[Tensor], place: list[Any], position: int, scale: float
) -> bool:
    """Write the rows from `position` on of tensors that are all as described, `largest` elements at most; or False.

    `place` says where the rows lie; see `HostRows`.
    """
    counted = largest <= MOST_ELEMENTS
    try:
        return compiled_read is not None and compiled_read(
            tensors, description, Tensor.is_neg, place, position, largest, counted, scale
        )
    except RuntimeError:  # values inside a transform
        return False


def align_at(
    addresses: Sequence[tuple[int, int]], pairs: Sequence[tuple[Tensor, Tensor]], rows: npt.NDArray[np.float64]
) -> None:
    """Write how the tensors of pair i point, which lie at `addresses[i]`, to row i of `rows`, shape (n, COLUMNS)."""
    firsts, seconds = [a for a, _ in addresses], [b for _, b in addresses]
    kinds, others = [KINDS[a.dtype] for a, _ in pairs], [KINDS[b.dtype] for _, b in pairs]
    sizes = [a.numel() for a, _ in pairs]
    threads = _threads_for(max(sizes, default=0))
    host_rows.align(firsts, kinds, seconds, others, sizes, rows.ctypes.data, PARALLEL, threads)


def rows_and_counts(
    addresses: list[int], tensors: Sequence[Tensor], eps: float, scale: float = 1.0, *, histograms: bool = False
) -> tuple[npt.NDArray[np.float64], Counts]:
    """Return the statistics of tensors at addresses, shape (n, COLUMNS), and their counters, shape (n or 0, SLOTS)."""
    rows = np.zeros((len(tensors), COLUMNS))
    counts = np.zeros((len(tensors) if histograms else 0, SLOTS), np.uint32)
    read_many_at(addresses, tensors, eps, rows.ctypes.data, counts.ctypes.data if histograms else 0, scale)
    return rows, counts


def _threads_for(largest: int) -> int:
    return torch.get_num_threads() if largest > host_rows.SHARED_FROM else 1


def host_row(x: Tensor, eps: float = 0.0, implicit_zeros: int = 0) -> npt.NDArray[np.float64]:
    """Return the statistics of a detached CPU tensor, shape (COLUMNS,), including the zeros it does not store."""
    row = np.asarray(_EMPTY)
    if x.numel() == 0:
        return row
    x = _as_float(x)
    if KINDS:
        dense = _dense(x)
        read_at(dense.data_ptr(), dense, eps, row.ctypes.data)
    else:
        values = x.float() if x.dtype is torch.bfloat16 else x  # NumPy has no bfloat16
        row = row_of_array(values.resolve_neg().numpy(), eps)
    return _with_zeros(row, x.numel(), implicit_zeros) if implicit_zeros else row


def host_counts(x: Tensor, implicit_zeros: int = 0, scale: float = 1.0) -> Counts:
    """Return the counters of a detached CPU tensor times `scale`, shape (SLOTS,), with the zeros it does not store."""
    counts: Counts = np.zeros(SLOTS, np.uint32)
    if x.numel() + implicit_zeros > MOST_ELEMENTS:
        return counts
    if x.numel():
        x = _as_float(x)
        if KINDS:
            dense = _dense(x)
            counts = rows_and_counts([dense.data_ptr()], [dense], 0.0, histograms=True, scale=scale)[1][0]
        else:
            counts = counts_of((x.float() if x.dtype is torch.bfloat16 else x).resolve_neg().numpy(), scale)
    counts[MIDDLE] += implicit_zeros
    return counts


def _dense(x: Tensor) -> Tensor:
    """Return a contiguous tensor of the same values in any order; copies only where they are not dense in memory."""
    x = x.resolve_neg()
    if x.is_contiguous():
        return x
    strides = x.stride()
    by_stride = x.permute(sorted(range(x.dim()), key=lambda d: -strides[d]))
    return by_stride.contiguous()  # no copy for channels-last and transposed tensors


def _as_float(x: Tensor) -> Tensor:
    if x.is_complex():
        return x.to(torch.complex128).abs()
    if not x.is_floating_point():
        return x.double()
    return x if x.dtype in _READ else x.float()


def _with_zeros(row: npt.NDArray[np.float64], stored: int, implicit: int) -> npt.NDArray[np.float64]:
    """Return the row with `implicit` zeros added to the `stored` elements that were read."""
    low, high, mean, norm, nans, infs, zeros = row[:7]
    finite = stored - nans - infs
    total = mean * finite if finite else 0.0
    zeros = (zeros * stored + implicit) / (stored + implicit)
    return np.asarray(
        [np.fmin(low, 0.0), np.fmax(high, 0.0), total / (finite + implicit), norm, nans, infs, zeros, _NAN]
    )
