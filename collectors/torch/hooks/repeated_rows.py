"""Counts the samples of a batch that are there twice."""

from typing import Final

import torch
from torch import Tensor

MOST_ELEMENTS: Final = 2**18
"""Elements of an input that are looked at, a third of a millisecond of a core; of a larger one the beginning of each
sample."""

FEWEST_ROWS: Final = 8
FEWEST_ELEMENTS: Final = 16
"""Samples of a batch, and elements of one, below which two may be the same by chance."""

SAME: Final = 1e-6
"""Relative difference of two sums that are one: rounding in float32. Those of a hundred different samples differ by a
hundredth."""


def share_of_repeated(batch: Tensor) -> Tensor | None:
    """Return the share of the samples, along the first axis, that are another one's copy; None for a small batch.

    The result, of shape (), lies on the batch's device, which nothing waits for. Each sample is summed up with weights
    that tell its elements apart, and equal sums lie beside each other once they are sorted.

    >>> share_of_repeated(torch.arange(32.0).remainder(16)[:, None].expand(32, 20)).item()
    0.5
    """
    if batch.is_nested or batch.layout is not torch.strided or batch.is_complex():
        return None
    if batch.ndim == 0 or len(batch) < FEWEST_ROWS:
        return None
    flat = batch.detach().reshape(len(batch), batch[0].numel())[:, : max(1, MOST_ELEMENTS // len(batch))]
    if flat.shape[1] < FEWEST_ELEMENTS:
        return None
    places = torch.arange(flat.shape[1], device=flat.device, dtype=torch.float32)
    sums = (flat.to(torch.float32) * (2.0 + torch.cos(places))).sum(1).sort().values
    apart = (sums[1:] - sums[:-1]).abs()
    return (apart <= SAME * sums[1:].abs()).to(torch.float32).sum() / len(batch)
