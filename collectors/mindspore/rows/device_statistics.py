"""Statistics of tensors on an accelerator, by operations that nobody waits for."""

from mindspore import Tensor, mint, ops
from mindspore import dtype as mstype


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
