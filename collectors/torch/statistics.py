"""Statistics of one tensor in torch: a row of `COLUMNS` numbers, with the meaning of the NumPy reference."""

import math
from typing import Final

import torch
from torch import Tensor

from trainsentry.collectors.statistics import COLUMNS

Row = tuple[float, float, float, float, float, float, float, float]

_NAN: Final = math.nan
_EMPTY: Final[Row] = (_NAN, _NAN, _NAN, 0.0, 0.0, 0.0, _NAN, _NAN)
_DIRECT: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes whose squares neither overflow nor vanish in float64, so that no scaling is needed."""


def host_row(x: Tensor, eps: float = 0.0, implicit_zeros: int = 0) -> Row:
    """Return the statistics of a detached CPU tensor; the only place that reads tensor values on the host.

    Four vectorised passes: facts measured on CPU say that they beat one pass per statistic by 5 to 30 times.
    NaN and Inf are counted only when the norm shows that there are some.
    """
    if x.numel() == 0:
        return _EMPTY
    x = _as_float(x)
    if x.dtype in _DIRECT:
        norm = torch.linalg.vector_norm(x, dtype=torch.float64).item()
        if math.isfinite(norm):
            low, high = torch.aminmax(x)
            total = torch.sum(x, dtype=torch.float64).item()
            size = x.numel() + implicit_zeros
            zeros = (size - _count_over(x, eps)) / size
            row = (low.item(), high.item(), total / size, norm, 0.0, 0.0, zeros, _NAN)
            return _with_zero(row) if implicit_zeros else row
    return _careful_row(x.double(), eps, implicit_zeros)


def device_row(x: Tensor, eps: float = 0.0, implicit_zeros: int = 0) -> Tensor:
    """Return the statistics of a detached tensor as a row of shape (COLUMNS,) on its device.

    Plain tensor operations without any that waits for the device or branches on a value. The row is float64
    where the device has it, else float32; sums are of scaled values, so that both are safe from overflow.
    """
    dtype = row_dtype(x.device)
    size = x.numel() + implicit_zeros
    if x.numel() == 0:
        return torch.tensor(_EMPTY, dtype=dtype, device=x.device)
    wide = _as_float(x).to(dtype)
    finite = torch.isfinite(wide)
    inside = torch.where(finite, wide, torch.zeros_like(wide))
    low = torch.where(finite, wide, torch.full_like(wide, math.inf)).amin()
    high = torch.where(finite, wide, torch.full_like(wide, -math.inf)).amax()
    if implicit_zeros:
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    count = finite.sum().to(dtype) + implicit_zeros
    largest = inside.abs().amax()
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    scaled = inside / scale
    norm = torch.linalg.vector_norm(scaled) * scale
    some = count > 0
    nothing = torch.full_like(low, _NAN)
    zeros = ((wide.abs() <= eps).sum().to(dtype) + implicit_zeros) / size
    return torch.stack(
        [
            torch.where(some, low, nothing),
            torch.where(some, high, nothing),
            torch.where(some, scaled.sum() / count * scale, nothing),
            norm,
            torch.isnan(wide).sum().to(dtype),
            torch.isinf(wide).sum().to(dtype),
            zeros,
            nothing,
        ]
    )


def row_dtype(device: torch.device) -> torch.dtype:
    """Return float64 where the device has it, else float32 (Ascend and Apple chips have no float64)."""
    return torch.float32 if device.type in {"npu", "mps"} else torch.float64


def _as_float(x: Tensor) -> Tensor:
    if x.is_complex():
        return x.to(torch.complex128).abs()
    if not x.is_floating_point():
        return x.double()
    return x if x.dtype in _DIRECT or x.dtype is torch.float64 else x.float()


def _count_over(x: Tensor, eps: float) -> int:
    above = torch.count_nonzero(x) if eps == 0.0 else torch.count_nonzero(x.abs() > eps)
    return int(above.item())


def _with_zero(row: Row) -> Row:
    return (min(row[0], 0.0), max(row[1], 0.0), *row[2:])


def _careful_row(x: Tensor, eps: float, implicit_zeros: int) -> Row:
    """Return the row of a float64 tensor with non-finite values, or whose squares leave the range."""
    size = x.numel() + implicit_zeros
    nans, infs = torch.isnan(x), torch.isinf(x)
    finite = x[~(nans | infs)]
    bad = float(nans.sum().item()), float(infs.sum().item())
    zeros = (float((x.abs() <= eps).sum().item()) + implicit_zeros) / size
    if finite.numel() == 0:
        empty: Row = (_NAN, _NAN, _NAN, 0.0, *bad, zeros, _NAN)
        return (0.0, 0.0, 0.0, *empty[3:]) if implicit_zeros else empty
    largest = finite.abs().max().item()
    scaled = finite / (largest or 1.0)
    norm = torch.linalg.vector_norm(scaled).item() * (largest or 1.0)
    mean = scaled.sum().item() / (finite.numel() + implicit_zeros) * (largest or 1.0)
    row: Row = (finite.min().item(), finite.max().item(), mean, norm, *bad, zeros, _NAN)
    return _with_zero(row) if implicit_zeros else row


assert len(_EMPTY) == COLUMNS
