"""Counts the samples of a batch that are there twice."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

MOST_ELEMENTS: Final = 2**18
"""Elements of a batch that are looked at, a third of a millisecond of a core: every so many of a larger one, as the
beginning of each sample may be a border, or a prompt that all share."""

FEWEST_ROWS: Final = 4
FEWEST_ELEMENTS: Final = 16
"""Samples of a batch, and elements of one, below which two may be the same by chance."""

SMALL: Final = 8
HALF: Final = 0.5
"""Samples of a batch below which fewer copies than half of them count as none: one of four may be drawn twice."""

SAME: Final = 1e-6
"""Relative difference of two sums that are one: rounding in float32. Those of a hundred different samples differ by a
hundredth."""


def share_of_repeated(inputs: Sequence[Tensor]) -> Tensor | None:
    """Return the share of a batch's samples, along the first axis, that are another one's copy in each input.

    The result, of shape (), lies on the batch's device, which nothing waits for; None for a small batch. Each sample is
    summed up with weights that tell its elements apart, without what it has in common with the first one, and equal
    sums lie beside each other once they are sorted. Inputs that have another number of samples are left out, as are
    those whose elements are no plain numbers.

    >>> share_of_repeated([torch.arange(32.0).remainder(16)[:, None].expand(32, 20)]).item()
    0.5
    """
    batches = [x for x in inputs if not (x.is_nested or x.layout is not torch.strided or x.is_complex()) and x.ndim > 1]
    if not batches or len(batches[0]) < FEWEST_ROWS:
        return None
    first = batches[0]
    alike = [x for x in batches if len(x) == len(first) and x.device == first.device]
    parts = [_thinned(x, len(alike)).to(torch.float32).reshape(len(first), -1) for x in alike]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if flat.shape[1] < FEWEST_ELEMENTS:
        return None
    weights = (_host_weights if flat.is_cpu else _weights)(flat.shape[1], flat.device)
    sums = ((flat - flat[:1]) * weights).sum(1).sort().values
    same = (sums[1:] - sums[:-1]).abs_() <= SAME * sums[1:].abs()
    share = same.sum(dtype=torch.float32) / len(first)
    return share * (share >= HALF) if len(first) < SMALL else share


def _weights(count: int, device: torch.device) -> Tensor:
    """Return numbers that tell the elements of a sample apart, shape (count,)."""
    return torch.arange(count, device=device, dtype=torch.float32).cos_()


_host_weights: Final = lru_cache(maxsize=8)(_weights)
"""Keeps them in host memory, of a few sizes of batches and 128 kB each at most: there the cosines take longer than all
the rest. On a device they are made anew, as another stream may use them before they are there."""


def _thinned(batch: Tensor, inputs: int) -> Tensor:
    """Return a view of every so many elements along each axis but the first, so many that all inputs are few enough."""
    view = batch.detach()
    for axis in range(1, view.ndim):
        more = view.numel() * inputs / MOST_ELEMENTS
        if more > 1:
            step = min(math.ceil(more), max(view.shape[axis] // 2, 1))
            view = view[(slice(None),) * axis + (slice(None, None, step),)]
    return view
