"""Gradients as they are accumulated in the backward pass: their order, and each micro-step's running sum."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.inert_hook import InertWhenCopied
from trainsentry.collectors.torch.model_names import NamedParameter

PART = "gradients"


class AccumulationHooks:
    """Calls `arrived(parameter, micro_step)` whenever a gradient has been accumulated, while attached.

    `order` holds each parameter once, in the order in which the backward pass first reached it.
    """

    def __init__(self, guard: Guard, arrived: Callable[[NamedParameter, int], None] | None) -> None:
        self.guard = guard
        self.order: dict[str, int] = {}
        self._arrived = arrived
        self._counts: dict[str, int] = {}
        self._handles: list[RemovableHandle] = []

    def attach(self, parameters: Iterable[NamedParameter]) -> None:
        """Hook the parameters that train."""
        for named in parameters:
            if named.parameter.requires_grad and named.parameter.is_leaf:
                hook = _Accumulated(self, named)
                self._handles.append(named.parameter.register_post_accumulate_grad_hook(hook))

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
        """Take note of one accumulated gradient."""
        self.order.setdefault(named.name, len(self.order))
        micro_step = self._counts.get(named.name, 0)
        self._counts[named.name] = micro_step + 1
        if self._arrived is not None:
            self._arrived(named, micro_step)

    def last_micro_step(self, named: NamedParameter) -> int:
        """Return the micro-step that reached a parameter last."""
        return max(self._counts.get(named.name, 0) - 1, 0)


@dataclass(frozen=True, slots=True)
class _Accumulated(InertWhenCopied):
    owner: AccumulationHooks
    named: NamedParameter

    def __call__(self, parameter: Tensor) -> None:
        self.owner.guard.run(PART, self.owner.note, self.named)
