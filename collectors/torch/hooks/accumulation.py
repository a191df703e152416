"""Hooks each gradient's accumulation in the backward pass, for the order and the running sum of each micro-step."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainsentry.collectors.guard import Guard, InertWhenCopied
from trainsentry.collectors.shared.forward_passes import MAX_MICRO_STEPS
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter

PART = "gradients"


class AccumulationHooks:
    """Calls `arrived(parameter, micro_step)` after each accumulation of a gradient, while attached.

    `passed` gets the number of gradients that the parameter has had since it was hooked.

    `order` holds each parameter once, in the order in which the backward pass first reached it.
    """

    def __init__(
        self,
        guard: Guard,
        arrived: Callable[[NamedParameter, int], None] | None,
        passed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.guard = guard
        self._passed = passed
        self.order: dict[nn.Parameter, int] = {}
        self.arrived = arrived
        self._counts: Counter[int] = Counter()
        self._handles: list[RemovableHandle] = []

    def attach(self, parameters: Iterable[NamedParameter]) -> None:
        """Hook the trainable parameters."""
        for named in parameters:
            parameter = named.own
            lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
            if parameter.requires_grad and parameter.is_leaf and not lazy:
                hook = _Accumulated(self, named)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Remove the hooks and forget the counts of the step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._counts.clear()

    @property
    def attached(self) -> bool:
        """Whether hooks are in place."""
        return bool(self._handles)

    def note(self, named: NamedParameter) -> None:
        """Count one accumulated gradient, and report it."""
        self.order.setdefault(named.own, len(self.order))
        micro_step = self._counts[id(named)]
        self._counts[id(named)] += 1
        self._passed(micro_step + 1)
        if self.arrived is not None and micro_step < MAX_MICRO_STEPS:
            self.arrived(named, micro_step)

    def last_micro_step(self, named: NamedParameter) -> int:
        """Return the last micro-step in which a parameter got a gradient."""
        return min(max(self._counts[id(named)] - 1, 0), MAX_MICRO_STEPS - 1)


@dataclass(frozen=True, slots=True)
class _Accumulated(InertWhenCopied):
    owner: AccumulationHooks
    named: NamedParameter

    def __call__(self, parameter: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        self.owner.guard.run(PART, self.owner.note, self.named)
