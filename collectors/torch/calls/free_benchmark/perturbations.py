"""Changes the arguments of a call a little; a change that rounding would undo is made by one unit in the last place."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.calls import free_benchmark
from trainsentry.collectors.calls.free_benchmark import IMPROVE_PRECISION, NO_CHANGE, TO_CPU
from trainsentry.collectors.shared import nested

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

NOISE: Final = {getattr(torch, name): noise for name, noise in free_benchmark.NOISE.items()}
"""What `add_noise` adds, by torch's dtypes."""

_BITS: Final = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
"""Integers as wide as each dtype: the next one in size is the next number."""

HALVES: Final = frozenset({torch.float16, torch.bfloat16})


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a value with its tensors changed, also those in tuples, lists and mappings."""
    return nested.mapped(value, lambda item: change(item) if isinstance(item, Tensor) else item)


def perturbed(mode: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, autocast: bool) -> Arguments | None:
    """Return the arguments of a call after a perturbation; None when it changes nothing.

    `autocast` says that the call ran under it, so that higher precision is reached by running it without.
    """
    if mode == NO_CHANGE:
        return args, dict(kwargs)
    if mode == TO_CPU:
        return mapped(args, _on_cpu), {k: _cpu_device(mapped(v, _on_cpu)) for k, v in kwargs.items()}
    done: list[bool] = []

    def change(tensor: Tensor) -> Tensor:
        if mode == IMPROVE_PRECISION:
            done.append(tensor.dtype in HALVES)
            return tensor.float() if done[-1] else tensor
        if any(done) or tensor.dtype not in NOISE or not tensor.numel():
            return tensor
        changed, bits = _CHANGES[mode](tensor), _BITS[tensor.dtype]
        done.append(not torch.equal(changed.view(bits), tensor.view(bits)))  # of bits: NaN is unequal to itself
        return changed

    changed = mapped(args, change), mapped(dict(kwargs), change)
    return changed if any(done) or (mode == IMPROVE_PRECISION and autocast) else None


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.cpu().float() if tensor.dtype in HALVES else tensor.cpu()


def _cpu_device(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _with_noise(tensor: Tensor) -> Tensor:
    """Add the noise of the dtype; an element that swallows it moves to its neighbour instead."""
    noise = NOISE[tensor.dtype]
    large = (tensor.abs() > math.sqrt(noise)) & torch.isfinite(tensor)
    changed = torch.where(large, tensor + noise, tensor)
    bits = tensor.view(_BITS[tensor.dtype])
    largest = tensor.abs() == torch.finfo(tensor.dtype).max  # its neighbour outwards is Inf
    neighbour = torch.where(largest, bits - 1, bits + 1).view(tensor.dtype)
    return torch.where(large & (changed == tensor), neighbour, changed)


def _with_other_bits(tensor: Tensor) -> Tensor:
    """Flip the last bit of each normal number."""
    normal = (tensor.abs() > torch.finfo(tensor.dtype).tiny) & torch.isfinite(tensor)
    return torch.where(normal, (tensor.view(_BITS[tensor.dtype]) ^ 1).view(tensor.dtype), tensor)


def _with_ends_exchanged(tensor: Tensor) -> Tensor:
    """Exchange the first element and the last."""
    flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    ends = flat[[0, -1]]
    flat[0], flat[-1] = ends[1], ends[0]
    return flat.view(tensor.shape)


_CHANGES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "add_noise": _with_noise,
    "bit_noise": _with_other_bits,
    "change_value": _with_ends_exchanged,
}
