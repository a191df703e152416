"""Reads the fingerprints of a watched model's parameters, buffers and optimizer state, this rank's part of each."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainsentry.collectors.fingerprint import Fingerprint
from trainsentry.collectors.guard import Guard, InertWhenCopied
from trainsentry.collectors.run_settings import Settings
from trainsentry.collectors.series import BUFFER, PARAMETER
from trainsentry.collectors.shared.host_rows import state_quantity
from trainsentry.collectors.torch.fingerprints.bit_sums import bit_sums, can_be_summed
from trainsentry.collectors.torch.fingerprints.run_settings import settings_of
from trainsentry.collectors.torch.hooks.nested_tensors import tensors_in
from trainsentry.collectors.torch.parameters.readers import state_of
from trainsentry.collectors.torch.rows.local_tensor import is_readable, local
from trainsentry.collectors.torch.rows.shard_layouts import dtype_name
from trainsentry.collectors.torch.sharding.clean_names import CleanNames
from trainsentry.collectors.torch.sharding.dtensor import is_dtensor, region_of
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter
from trainsentry.collectors.torch.sharding.model_names import share_names
from trainsentry.collectors.torch.watch import TorchWatch

PART: Final = "fingerprints"

STEADY_PASSES: Final = 5
"""Passes for which a module's operations must have been the same when a checkpoint is saved: layers drop out at
random."""


@dataclass(frozen=True, slots=True)
class _Located:
    """A tensor to read: its quantity and name, its local part, and where that lies in the whole."""

    quantity: str
    name: str
    tensor: Tensor
    whole: tuple[int, ...]
    region: str
    persistent: bool = True


class ModelFingerprints:
    """Implements `FingerprintReader` for a watched torch model."""

    def __init__(self, watch: TorchWatch) -> None:
        self._watch = watch
        self._handles: list[Any] = []

    def read(self, *, buffers: bool = True) -> list[Fingerprint]:
        """Return the fingerprints of every parameter, of optimizer state, and of every buffer."""
        found = [*self._parameters(), *self._state(), *(self._buffers() if buffers else ())]
        return _fingerprints(found)

    def at_next_passes(self, take: Callable[[list[Fingerprint]], bool]) -> bool:
        """Give `take` the buffers' fingerprints before each forward pass until it returns False."""
        self.end_passes()
        chunks = self._watch.names.chunks
        if any(map(_is_compiled, chunks)):
            return False
        hook = _BeforePass(self._watch.guard, lambda: self._pass(take))
        self._handles = [chunk.register_forward_pre_hook(hook) for chunk in chunks]
        return True

    def settings(self, *, last_step: bool) -> Settings:
        """Return what the run is set to: with the modes and passes of the last step, or with those of this one."""
        watch = self._watch
        if last_step:
            steady = watch.operations.steady(STEADY_PASSES)
            return settings_of(watch, watch.pass_forms.steady(), watch.modes_at_step_end, steady, last_step=True)
        modes = [named.module.training for named in watch.names.modules]
        return settings_of(watch, watch.pass_forms.now, modes, watch.operations.steady(0), last_step=False)

    def end_passes(self) -> None:
        """Remove the hooks of `at_next_passes`."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _pass(self, take: Callable[[list[Fingerprint]], bool]) -> None:
        if not take(_fingerprints(list(self._buffers()))):
            self.end_passes()

    def _parameters(self) -> Iterator[_Located]:
        for named in self._watch.names.parameters:
            located = _own_values(named)
            if located is not None:
                yield _Located(PARAMETER, named.name, *located)

    def _state(self) -> Iterator[_Located]:
        for optimizer in self._watch.optimizers:
            state = state_of(optimizer)
            for named in self._watch.names.parameters:
                for key, value in state.get(named.parameter, {}).items():
                    for path, tensor in tensors_in(value):
                        quantity = state_quantity(key) + ("" if isinstance(value, Tensor) else f".{path}")
                        yield _Located(quantity, named.name, *_like(named, tensor))

    def _buffers(self) -> Iterator[_Located]:
        chunks, seen = self._watch.names.chunks, set[int]()
        prefixed = share_names(chunks)
        for stage, chunk in enumerate(chunks):
            names = CleanNames(chunk, str(stage) if prefixed else "")
            for raw, module in chunk.named_modules():
                for leaf, buffer in module._buffers.items():
                    if buffer is not None and id(buffer) not in seen:
                        seen.add(id(buffer))
                        name = names.of(f"{raw}.{leaf}" if raw else leaf)
                        kept = leaf not in module._non_persistent_buffers_set
                        yield _Located(BUFFER, name, *_placed(buffer), persistent=kept)


class _BeforePass(InertWhenCopied):
    """The hook before a model's forward pass; a graph that is being compiled goes on without it."""

    def __init__(self, guard: Guard, read: Callable[[], None]) -> None:
        self._guard = guard
        self._read = read

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._guard.run(PART, self._read)


def _own_values(named: NamedParameter) -> tuple[Tensor, tuple[int, ...], str] | None:
    """Return the values of the model's own parameter, or of this rank's part where the model's is a placeholder."""
    whole = named.fragment.whole if named.fragment is not None else tuple(named.parameter.shape)
    if named.owner is not None and named.owner.numel() == math.prod(whole):
        return _placed(named.owner)
    return _like(named, named.parameter)


def _like(named: NamedParameter, tensor: Tensor) -> tuple[Tensor, tuple[int, ...], str]:
    """Return a tensor that may have the layout of a parameter, with its place in the whole."""
    if named.fragment is None or tensor.numel() != named.parameter.numel():
        return _placed(tensor)
    return named.fragment.of(local(tensor)), named.fragment.whole, named.fragment.region


def _placed(tensor: Any) -> tuple[Tensor, tuple[int, ...], str]:
    whole = tuple(int(n) for n in tensor.shape)
    return (local(tensor), whole, region_of(tensor, whole)) if is_dtensor(tensor) else (tensor, whole, "")


def _fingerprints(located: list[_Located]) -> list[Fingerprint]:
    """Return the fingerprints of tensors whose bits can be read where they are."""
    readable = [x for x in located if _has_bits(x.tensor) and can_be_summed(x.tensor, x.region)]
    sums = bit_sums([(x.tensor, x.whole, x.region) for x in readable])
    return [
        Fingerprint(x.quantity, x.name, dtype_name(x.tensor), x.whole, x.region, *both, persistent=x.persistent)
        for x, both in zip(readable, sums, strict=True)
    ]


def _has_bits(tensor: Tensor) -> bool:
    return is_readable(tensor) and not is_traceable_wrapper_subclass(tensor)


def _is_compiled(chunk: nn.Module) -> bool:
    """Whether a model's forward pass runs in a compiled or scripted graph, in which no hook is to appear."""
    if isinstance(chunk, torch.jit.ScriptModule) or getattr(chunk, "_compiled_call_impl", None) is not None:
        return True
    return type(chunk).__name__ == "OptimizedModule"
