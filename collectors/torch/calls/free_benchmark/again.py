"""Makes a call again without a trace in the training: random numbers, gradients and arguments stay as they are."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.calls.free_benchmark import IMPROVE_PRECISION, TO_CPU
from trainsentry.collectors.torch.calls.call_arguments import may_change
from trainsentry.collectors.torch.calls.free_benchmark.perturbations import mapped
from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.hooks.nested_tensors import list_tensors
from trainsentry.collectors.torch.rows.local_tensor import version_of

CHANGES_BUFFERS: Final = frozenset({"batch_norm", "instance_norm", "native_batch_norm", "embedding_renorm"})
"""Functions that change buffers among their arguments although their name does not say so."""

RandomStates = list[tuple[Any, list[Tensor]]]


@dataclass(frozen=True)
class OriginalCall:
    """A call as it was made: its arguments (copies of what it changes), random numbers, and autocast's settings.

    `given` are the tensors of its arguments with their versions; `needed` tells of each its identity, and whether it
    required a gradient.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    changes: bool
    random: RandomStates
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    given: tuple[tuple[Tensor, int | None], ...]
    needed: tuple[tuple[int, bool], ...]

    @property
    def under_autocast(self) -> bool:
        """Whether autocast chose the precision of the call."""
        return any(enabled for _, enabled, _ in self.autocast)

    @property
    def is_intact(self) -> bool:
        """Whether none of the tensors that it was given has changed since."""
        return all(version_of(tensor) == version for tensor, version in self.given)


def remember(
    stem: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, known_to_change: bool
) -> OriginalCall:
    """Take down a call before it is made."""
    tensors = list_tensors((*args, *kwargs.values()))
    changes = known_to_change or may_change(stem, args, kwargs)
    buffers = not changes and stem.rpartition(".")[2] in CHANGES_BUFFERS
    used = {d.type: d for d in (CPU, *(device_of(t) for t in tensors))}
    random = [(device, device.rng_states()) for device in used.values()]
    kinds = dict.fromkeys(("cpu", *(t.device.type for t in tensors)))
    autocast = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds if _has_autocast(k))
    given = tuple((t, version_of(t)) for t in tensors if t.requires_grad or not buffers)
    needed = tuple((id(t), t.requires_grad and torch.is_grad_enabled()) for t in tensors)
    if changes or buffers:
        args, kwargs = copies((args, dict(kwargs)), all_of_them=changes)
    return OriginalCall(function, args, kwargs, changes, random, autocast, given, needed)


def copies(value: Any, *, all_of_them: bool) -> Any:
    """Return a value with copies of its tensors, or only of those without a gradient; one that occurs twice has one."""
    known: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if tensor.requires_grad and not all_of_them:
            return tensor
        if id(tensor) not in known:
            known[id(tensor)] = tensor.detach().clone()
        return known[id(tensor)]

    return mapped(value, copied)


def with_leaves(
    call: OriginalCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor | None]]:
    """Return arguments of their own for a repetition, and those that require a gradient, None for the others.

    They require gradients as the original ones did, because an operation may choose its kernel by that. A tensor that
    occurs twice is one leaf. What the call changes is no leaf: those cannot be changed in place.
    """
    needed = iter(call.needed)
    known: dict[int, Tensor] = {}
    leaves: list[Tensor | None] = []

    def leaf(tensor: Tensor) -> Tensor:
        key, wanted = next(needed)
        if key not in known:
            made = tensor.detach().requires_grad_(wanted)
            known[key] = made.clone() if call.changes else made
        leaves.append(known[key] if wanted else None)
        return known[key]

    with torch.enable_grad():
        changed = mapped(args, leaf), mapped(dict(kwargs), leaf)
    return *changed, leaves


@contextmanager
def as_it_was(call: OriginalCall, mode: str, *, hidden: bool = True) -> Iterator[None]:
    """Restore the random numbers and autocast of a call, and afterwards those of the training.

    When `hidden`, hooks of the program on saved tensors, such as those that offload them, do not see the repetition.
    """
    precise = mode in {IMPROVE_PRECISION, TO_CPU}
    now = [(device, device.rng_states()) for device, _ in call.random]
    with ExitStack() as stack:
        if hidden:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        for kind, enabled, dtype in call.autocast:
            asked = enabled and not precise
            if asked or torch.is_autocast_enabled(kind):
                # A cached cast of a weight would outlive the repetition, without a gradient.
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=asked, cache_enabled=False))
        for device, states in call.random:
            device.restore_rng_states(states)
        try:
            yield
        finally:
            for device, states in now:
                device.restore_rng_states(states)


def _has_autocast(kind: str) -> bool:
    return bool(torch.amp.is_autocast_available(kind))


def _same(tensor: Tensor) -> Tensor:
    return tensor
