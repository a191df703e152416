"""What a tensor holds on this rank, as a plain dense tensor."""

import torch
from torch import Tensor

from trainsentry.collectors.series import Layout


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, and any other tensor as it is, detached."""
    to_local = getattr(tensor, "to_local", None)
    return (to_local() if to_local is not None else tensor).detach()


def is_readable(tensor: Tensor) -> bool:
    """Whether the tensor has values: a meta or fake tensor has none."""
    return not tensor.is_meta and not isinstance(tensor, torch._subclasses.FakeTensor)


def stored_values(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the stored values of a local tensor and how many zeros it has that are not stored."""
    if tensor.layout is torch.sparse_coo:
        values = tensor.coalesce().values()
        return values, max(tensor.numel() - values.numel(), 0)
    if tensor.layout is not torch.strided and hasattr(tensor, "values"):
        values = tensor.values()
        implicit = 0 if tensor.is_nested else max(tensor.numel() - values.numel(), 0)
        return values, implicit
    return tensor, 0


def layout_of(tensor: Tensor) -> Layout:
    """Return shape, dtype and number of elements of a local tensor."""
    numel = tensor.numel()
    return Layout(tuple(int(n) for n in tensor.shape), str(tensor.dtype).removeprefix("torch."), numel)
