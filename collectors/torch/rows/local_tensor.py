"""Reads a tensor's part on this rank: as a plain tensor, whether it has values, and which are stored."""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

PLAIN: Final = frozenset({Tensor, nn.Parameter, nn.Buffer})
"""Tensor types whose values are at their address; a subclass may keep them elsewhere."""


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or any other tensor itself, detached.

    Waits for the result of a functional collective, as its next use would.
    """
    if type(tensor) is Tensor:
        return tensor.detach()
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return _arrived(tensor).detach()
    with torch.no_grad():  # makes no graph, and returns the shard itself
        return _arrived(to_local()).detach()


def _arrived(tensor: Tensor) -> Tensor:
    """Return what a functional collective gives, when it has."""
    trigger_wait = getattr(tensor, "trigger_wait", None)
    return tensor if trigger_wait is None else trigger_wait()


_IS_BATCHED: Final = getattr(torch._C._functorch, "is_legacy_batchedtensor", None)


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor is a batch of gradients (`is_grads_batched`), of which torch shows one and computes all."""
    return _IS_BATCHED is not None and bool(_IS_BATCHED(tensor))


def is_readable(tensor: Tensor) -> bool:
    """Whether the tensor has values that can be read.

    Meta and fake tensors have none, nor have those that autograd knows to be zero, or whose memory sharded training has
    released. A quantized tensor has codes instead, as has a subclass that keeps other tensors, and a tensor inside a
    functorch transform (vmap, grad) has no values yet.
    """
    return not (
        tensor.is_meta
        or tensor._is_zerotensor()
        or tensor.is_quantized
        or isinstance(tensor, torch._subclasses.FakeTensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or is_released(tensor)
        or _keeps_other_tensors(tensor)
    )


LOW: Final = 1 << 36
"""Addresses below are looked at twice: a view of memory that was released lies at its place in it, counted from 0."""


def is_released(tensor: Tensor) -> bool:
    """Whether a tensor has elements, and its memory was released."""
    return is_strided(tensor) and tensor.untyped_storage().nbytes() == 0


def _keeps_other_tensors(tensor: Tensor) -> bool:
    """Whether a subclass has no memory of its own; one with a part on this rank has its values there."""
    if type(tensor) in PLAIN or hasattr(tensor, "to_local") or hasattr(tensor, "trigger_wait"):
        return False
    return is_strided(tensor) and not tensor.data_ptr()


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor has elements that lie in one piece of memory, whose address it knows."""
    return tensor.layout is torch.strided and tensor.numel() > 0


def address_in_memory(tensor: Tensor) -> int:
    """Return the address of a tensor that has a storage; 0 where its memory was released, or it has no elements."""
    address = tensor.data_ptr()
    return 0 if address < LOW and is_released(tensor) else address


def are_plain(tensors: Iterable[Any]) -> bool:
    """Whether all tensors have values in memory, one element after the other; others are sparse, or of a transform."""
    return all(
        type(x) is Tensor and not is_batched(x) and x.layout is torch.strided and is_readable(x) and not x.is_conj()
        for x in tensors
        if x is not None
    )


def version_of(tensor: Tensor) -> int | None:
    """Return autograd's count of in-place changes; None for an inference tensor, which has no count."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def storage_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's storage and the one after its end; (0, 0) where it has no memory."""
    try:
        storage = (tensor if type(tensor) is Tensor else local(tensor)).untyped_storage()
        start = storage.data_ptr()
    except (NotImplementedError, RuntimeError):  # of sparse and traced tensors
        return 0, 0
    return start, start + storage.nbytes()


def whole_of(tensor: Tensor) -> Tensor:
    """Return the base of a view that covers all of the base's elements in order; else the tensor itself."""
    base = tensor._base
    if base is None or base.numel() != tensor.numel() or base.dtype is not tensor.dtype or tensor.is_neg():
        return tensor
    return base if tensor.is_contiguous() and base.is_contiguous() else tensor


def stored_values(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the stored values of a local tensor, and the number of its zeros that are not stored."""
    if tensor.layout is torch.sparse_coo:
        values = tensor.coalesce().values()
        return values, max(tensor.numel() - values.numel(), 0)
    if tensor.layout is not torch.strided and hasattr(tensor, "values"):
        values = tensor.values()
        return values, 0 if tensor.is_nested else max(tensor.numel() - values.numel(), 0)
    if tensor.is_nested:
        return torch.cat([part.reshape(-1) for part in tensor.unbind()]), 0
    return tensor, 0
