"""Gradients of one micro-batch before any rank's part is added to another's, where the sum never stands alone.

Under DDP a parameter's own gradient is the local sum until its bucket is reduced, and the hooks of `accumulation`
see it. Sharded parameters have no such moment: their gradient exists only on its way to the reduction.
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
"""A row is what one micro-batch added."""

RUNNING_SUM: Final = "running_sum"
"""A row is the sum over the micro-batches so far."""


class PreReductionHooks:
    """Calls `arrived(parameter, micro_step, gradient)` for each gradient on its way to the reduction, while attached.

    Where the model's own parameters stay in the graph, a hook on them sees the gradient before it is accumulated. Where
    other tensors stand for them as a module is entered, those are hooked then.
    """

    def __init__(self, guard: Guard, arrived: Callable[[NamedParameter, int, Tensor], None]) -> None:
        self.guard = guard
        self._arrived = arrived
        self._counts: Counter[int] = Counter()
        self._handles: list[RemovableHandle] = []
        self._hooked: dict[int, weakref.ref[Tensor]] = {}

    def attach(self, parameters: Iterable[NamedParameter], modules: Sequence[NamedModule]) -> None:
        """Hook sharded parameters that train, or the modules that own them."""
        owners = {(m.name, m.vpp_stage): m.module for m in modules}
        inside: dict[int, tuple[nn.Module, list[NamedParameter]]] = {}
        for named in parameters:
            if named.sharding is None or not named.own.requires_grad:
                continue
            if named.sharding.before_reduction == "on_owner":
                self._hook(named, named.own)
                continue
            module = owners.get((named.module, named.vpp_stage))
            if module is not None:
                inside.setdefault(id(module), (module, []))[1].append(named)
        for module, held in inside.values():
            self._handles.append(module.register_forward_pre_hook(_Entered(self, tuple(held))))

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

    def entered(self, module: nn.Module, held: Sequence[NamedParameter]) -> None:
        """Hook the tensors that stand for a module's parameters in its forward pass."""
        for named in held:
            tensor = named.sharding.in_forward(module, named.leaf) if named.sharding is not None else None
            if tensor is None or not tensor.requires_grad:
                continue
            known = self._hooked.get(id(tensor))
            if known is None or known() is not tensor:
                self._hooked[id(tensor)] = weakref.ref(tensor)
                self._hook(named, tensor)

    def note(self, named: NamedParameter, gradient: Tensor) -> None:
        """Take note of one gradient on its way."""
        micro_step = self._counts[id(named)]
        self._counts[id(named)] += 1
        if micro_step < MAX_MICRO_STEPS:
            self._arrived(named, micro_step, gradient)

    def _hook(self, named: NamedParameter, tensor: Tensor) -> None:
        handle = tensor.register_hook(_Passing(self, named))
        if tensor.is_leaf:  # any other tensor takes its hooks along when the graph is freed
            self._handles.append(handle)


@dataclass(frozen=True, slots=True)
class _Entered(InertWhenCopied):
    owner: PreReductionHooks
    held: tuple[NamedParameter, ...]

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.owner.guard.run(PART, self.owner.entered, module, self.held)


@dataclass(frozen=True, slots=True)
class _Passing(InertWhenCopied):
    owner: PreReductionHooks
    named: NamedParameter

    def __call__(self, gradient: Tensor) -> None:
        if not torch.compiler.is_compiling() and self.owner.attached:
            self.owner.guard.run(PART, self.owner.note, self.named, gradient)
