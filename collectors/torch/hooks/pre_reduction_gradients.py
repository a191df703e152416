"""Hooks each rank's own gradient of a micro-batch before reduction, for sharded parameters.

Under DDP, `parameter.grad` is the local sum until its bucket is reduced, and the hooks of `accumulation` read it. A
sharded parameter never stores its local sum: its gradient exists only on its way to the reduction.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainsentry.collectors.guard import Guard, InertWhenCopied
from trainsentry.collectors.shared.forward_passes import MAX_MICRO_STEPS
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter

PART = "gradients before reduction"

MICRO_BATCH: Final = "micro_batch"
"""A row is the gradient of one micro-batch."""

RUNNING_SUM: Final = "running_sum"
"""A row is the sum over the micro-batches so far."""


class PreReductionHooks:
    """Calls `arrived(parameter, micro_step, gradient)` for each gradient on its way to the reduction, while attached.

    Where the autograd graph contains the model's own parameters, a hook on them sees each gradient before it is
    accumulated. Where a module's forward pass uses other tensors in their place, those are hooked at its entry.
    """

    def __init__(self, guard: Guard, arrived: Callable[[NamedParameter, int, Tensor], None]) -> None:
        self.guard = guard
        self._arrived = arrived
        self._counts: Counter[int] = Counter()
        self._handles: list[RemovableHandle] = []
        self._hooked: dict[int, weakref.ref[Tensor]] = {}

    def attach(self, parameters: Iterable[NamedParameter], modules: Sequence[NamedModule]) -> None:
        """Hook the trainable sharded parameters, or the modules that own them."""
        owners = {(m.name, m.vpp_stage): m.module for m in modules}
        inside: dict[int, tuple[nn.Module, list[NamedParameter]]] = {}
        for named in parameters:
            if named.sharding is None or named.accumulates or not named.own.requires_grad:
                continue
            if named.sharding.before_reduction == "on_owner":
                self._hook(named, named.own)
                continue
            module = owners.get((named.module, named.vpp_stage))
            if module is not None:
                inside.setdefault(id(module), (module, []))[1].append(named)
        for module, members in inside.values():
            self._handles.append(module.register_forward_pre_hook(_Entered(self, tuple(members))))

    def detach(self) -> None:
        """Remove the hooks and forget the counts of the step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._counts.clear()

    @property
    def attached(self) -> bool:
        """Whether hooks are in place."""
        return bool(self._handles)

    def entered(self, module: nn.Module, parameters: Sequence[NamedParameter]) -> None:
        """Hook the tensors that a module's forward pass uses in place of its parameters."""
        for named in parameters:
            tensor = named.sharding.in_forward(module, named.leaf) if named.sharding is not None else None
            if tensor is None or not tensor.requires_grad:
                continue
            known = self._hooked.get(id(tensor))
            if known is None or known() is not tensor:
                self._hooked[id(tensor)] = weakref.ref(tensor)
                self._hook(named, tensor)

    def note(self, named: NamedParameter, gradient: Tensor) -> None:
        """Count one gradient, and report it."""
        micro_step = self._counts[id(named)]
        self._counts[id(named)] += 1
        if micro_step < MAX_MICRO_STEPS:
            self._arrived(named, micro_step, gradient)

    def _hook(self, named: NamedParameter, tensor: Tensor) -> None:
        handle = tensor.register_hook(_Passing(self, named))
        if tensor.is_leaf:  # freeing the graph frees the hooks of other tensors
            self._handles.append(handle)


@dataclass(frozen=True, slots=True)
class _Entered(InertWhenCopied):
    owner: PreReductionHooks
    parameters: tuple[NamedParameter, ...]

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.owner.guard.run(PART, self.owner.entered, module, self.parameters)


@dataclass(frozen=True, slots=True)
class _Passing(InertWhenCopied):
    owner: PreReductionHooks
    named: NamedParameter

    def __call__(self, gradient: Tensor) -> None:
        if not torch.compiler.is_compiling() and self.owner.attached:
            self.owner.guard.run(PART, self.owner.note, self.named, gradient)
