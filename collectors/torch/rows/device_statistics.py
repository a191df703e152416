"""Computes statistics of one tensor on any device, by tensor operations that neither wait nor branch on a value."""

import math
from typing import Final

import torch
from torch import Tensor

from trainsentry.collectors.statistics import COLUMNS
from trainsentry.collectors.torch.device.registry import device_of

_NAN: Final = math.nan
_EMPTY: Final = (_NAN, _NAN, _NAN, 0.0, 0.0, 0.0, _NAN, _NAN)


def device_row(x: Tensor, eps: float = 0.0, implicit_zeros: int = 0) -> Tensor:
    """Return the statistics of a detached tensor as a row of shape (COLUMNS,) on its device.

    No operation waits for the device or branches on a value. The row is float64 where the device has it, else float32;
    sums are of scaled values, so that neither overflows.
    """
    device = device_of(x)
    dtype = device.row_dtype
    size = x.numel() + implicit_zeros
    if x.numel() == 0:
        return torch.tensor(_EMPTY, dtype=dtype, device=x.device)
    if not (x.is_floating_point() or x.is_complex() or implicit_zeros) and dtype is torch.float64:
        return _row_of_integers(x.to(dtype), eps)
    wide = (x.to(device.wide_dtype(x.dtype)).abs() if x.is_complex() else x).to(dtype)
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


def _row_of_integers(wide: Tensor, eps: float) -> Tensor:
    """Return the row of integers, which are finite and whose squares no sum of doubles overflows."""
    low, high = torch.aminmax(wide)
    zeros = (wide.abs() <= eps).to(wide.dtype).mean()
    nothing = torch.zeros_like(low)
    row = [low, high, wide.mean(), torch.linalg.vector_norm(wide), nothing, nothing, zeros, torch.full_like(low, _NAN)]
    return torch.stack(row)


assert len(_EMPTY) == COLUMNS
