"""Compares two results of a call by msprobe's measure, over all of their elements, with NaN and Inf."""

import math
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.calls import free_benchmark
from trainsentry.collectors.calls.free_benchmark import (
    BACKWARD_SMALL,
    CHUNK,
    CPU_BALANCE,
    NAN,
    NO_CHANGE,
    SYMBOL_FLIPPING,
    ResultDifference,
)
from trainsentry.collectors.torch.calls.free_benchmark.perturbations import NOISE
from trainsentry.collectors.torch.rows.local_tensor import is_readable, local

CPU_RATIOS: Final = {getattr(torch, name): ratio for name, ratio in free_benchmark.CPU_RATIOS.items()}
"""Largest relative difference of a device from the CPU, by torch's dtypes."""


def pairs(first: Any, second: Any, *, integers: bool) -> list[tuple[int, Tensor, Tensor]]:
    """Return the comparable tensors of two flat lists of results, with their numbers."""
    found = []
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        a, b = local(one), local(other)
        wanted = a.is_floating_point() or a.is_complex() or integers
        if wanted and a.shape == b.shape and a.numel() and is_readable(a) and a.layout is torch.strided:
            found.append((index, a, b))
    return found


def difference(mode: str, stage: str, original: Tensor, changed: Tensor) -> ResultDifference:
    """Return how far two results are apart.

    The ratio is that of the larger to the smaller absolute value, both at least some smallest value. Two results of
    opposite signs are `symbol_flipping`; where only one is NaN they are `nan`; equal infinities are equal.
    """
    if mode == NO_CHANGE:
        small = 0.0
    elif stage == "backward":
        small = BACKWARD_SMALL
    else:
        small = math.sqrt(NOISE.get(original.dtype, NOISE[torch.float32]))
    worst, word = 1.0, ""
    for a, b in zip(_chunks(original), _chunks(changed), strict=True):
        ratio, found = _of_chunk(a, b.to(a.device), small)
        worst, word = max(worst, ratio), max(word, found, key=(("", SYMBOL_FLIPPING, NAN)).index)
    return ResultDifference(worst, word)


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    chunks: tuple[Tensor, ...] = torch.split(real.reshape(-1), CHUNK)
    return chunks


def _wide(tensor: Tensor) -> Tensor:
    return (
        tensor if tensor.dtype is torch.float64 else tensor.float() if tensor.is_floating_point() else tensor.double()
    )


def _of_chunk(a: Tensor, b: Tensor, small: float) -> tuple[float, str]:
    a, b = _wide(a), _wide(b)
    unequal = (a != b) & ~(a.isnan() & b.isnan())
    a, b = a[unequal], b[unequal]
    if not a.numel():
        return 1.0, ""
    if bool((a.isnan() | b.isnan()).any()):
        return math.inf, NAN
    if bool((a * b < -small * small).any()):
        return math.inf, SYMBOL_FLIPPING
    one, other = a.abs().clamp(min=small), b.abs().clamp(min=small)
    ratio = torch.maximum(one, other) / torch.minimum(one, other)
    # Small values of opposite signs have the ratio 1, two unequal values with no smallest one at least some ratio.
    return max(float(ratio.max()), math.nextafter(1.0, 2.0) if small == 0.0 else 1.0), ""


def agrees_with_cpu(device: Tensor, cpu: Tensor, dtype: torch.dtype) -> tuple[bool, ResultDifference]:
    """Return whether a device's result is as near to the CPU's as its dtype allows, and the largest relative error."""
    allowed = CPU_RATIOS.get(dtype, CPU_RATIOS[torch.float32])
    worst, balance, count, word = 0.0, 0.0, 0, ""
    for a, b in zip(_chunks(device), _chunks(cpu), strict=True):
        one, other = _wide(a).cpu().double(), _wide(b).cpu().double()
        if bool((one.isnan() != other.isnan()).any()):
            word = NAN
        compared = (one != other) & ~(one.isnan() | other.isnan())
        count += one.numel()
        error = (one[compared] - other[compared]) / other[compared].abs().clamp(min=1.0)
        if error.numel():
            worst = max(worst, float(error.abs().nan_to_num(nan=math.inf).max()))
            balance += float(error.nan_to_num(nan=math.inf).sum())
    agrees = not word and worst <= allowed and abs(balance) / max(count, 1) <= CPU_BALANCE
    return agrees, ResultDifference(1.0 + worst, word)
