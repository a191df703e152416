"""Activations of modules and their gradients, through forward hooks and tensor hooks."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    Series,
)
from trainsentry.collectors.torch.containers import tensors_in, tensors_in_call
from trainsentry.collectors.torch.inert_hook import InertWhenCopied
from trainsentry.collectors.torch.model_graph import DataFlow
from trainsentry.collectors.torch.model_names import NamedModule
from trainsentry.collectors.torch.step_rows import StepRows

PART = "activations"

MAX_MICRO_STEPS: Final = 64
"""Forward passes recorded in one step; more are no accumulation but, say, an evaluation without `no_grad`."""

MAX_CALLS: Final = 16
"""Calls of a module recorded in one pass; a cell that is called for each token would fill the record."""


class ActivationHooks:
    """Hooks modules for one sampled step: `attach` before it, `detach` after it.

    A forward pass counts when gradients are enabled as its outermost module is entered, so an evaluation
    under `no_grad` leaves no rows; nor does a forward that is computed anew in the backward pass. Each pass
    through the same outermost module is a micro-step. A module's second call in one pass is named `<module>@1`.
    Passes and calls beyond the bounds above are not recorded; `left_out` counts them.
    """

    def __init__(self, rows: StepRows, guard: Guard, flow: DataFlow, *, forward: bool, backward: bool) -> None:
        self.rows = rows
        self.guard = guard
        self.flow = flow
        self.forward = forward
        self.backward = backward
        self.generation = 0
        self.left_out = 0
        self._handles: list[RemovableHandle] = []
        self._observed: frozenset[str] = frozenset()
        self._ids: dict[tuple[str, int, str, str, int, int, int], int] = {}
        self._passes: Counter[tuple[str, int]] = Counter()
        self._calls: Counter[tuple[str, int]] = Counter()
        self._depth = 0
        self._recording = False
        self._micro_step = 0

    def attach(self, modules: Iterable[NamedModule], observed: frozenset[str]) -> None:
        """Hook the modules that are `observed`, and the roots, which tell micro-steps apart.

        TorchScript modules take no hooks and are passed over.
        """
        self.generation += 1
        self._observed = observed
        self._depth, self._recording = 0, False
        self._passes.clear()
        self.flow.begin()
        for named in modules:
            if (named.name in observed or not named.name) and not isinstance(named.module, torch.jit.ScriptModule):
                before, after = _BeforeForward(self, named), _AfterForward(self, named)
                self._handles.append(named.module.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(named.module.register_forward_hook(after, with_kwargs=True))

    def detach(self) -> None:
        """Remove every hook; hooks on tensors of the step fall silent."""
        self.generation += 1
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def micro_steps(self) -> int:
        """The most passes that one outermost module has had in this step."""
        return max(self._passes.values(), default=0)

    def enter(self, named: NamedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that a module is entered, and observe its inputs."""
        if self._depth == 0 or not named.name:
            self._begin_pass(named, aborted=self._depth > 0)
        self._depth += 1
        if self._recording and named.name in self._observed:
            self._observe(named, "input", tensors_in_call(args, kwargs))

    def leave(self, named: NamedModule, output: Any) -> None:
        """Note that a module is left, and observe its outputs."""
        self._depth = max(self._depth - 1, 0)
        if self._recording and named.name in self._observed:
            self._observe(named, "output", tensors_in(output))
            self._calls[named.name, named.vpp_stage] += 1

    def _begin_pass(self, named: NamedModule, *, aborted: bool) -> None:
        """Note that an outermost module is entered; a pass behind one that raised takes its place."""
        self._depth = 0
        self._calls.clear()
        self._recording = _is_training_forward()
        if not self._recording:
            return
        key = (named.name, named.vpp_stage)
        if not aborted or not self._passes[key]:
            self._passes[key] += 1
        self._micro_step = self._passes[key] - 1
        if self._micro_step >= MAX_MICRO_STEPS:
            self.left_out += 1
            self._recording = False
            return

    def _observe(self, named: NamedModule, side: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        call = self._calls[named.name, named.vpp_stage]
        if call >= MAX_CALLS:
            self.left_out += 1
            return
        for path, tensor in tensors:
            if side == "output":
                self.flow.produced(named.name, tensor)
            else:
                self.flow.consumed(named.name, tensor)
            if self.forward:
                self.rows.add_shared(self._series(named, side, path, call, gradient=False), tensor)
            if self.backward and tensor.requires_grad and torch.is_grad_enabled():
                series_id = self._series(named, side, path, call, gradient=True)
                handle = tensor.register_hook(_GradientHook(self, series_id, self.generation))
                if tensor.is_leaf:  # any other tensor takes its hooks along when the graph is freed
                    self._handles.append(handle)

    def _series(self, named: NamedModule, side: str, path: str, call: int, *, gradient: bool) -> int:
        micro_step = self._micro_step
        key = (named.name, named.vpp_stage, side, path, call, micro_step, int(gradient))
        found = self._ids.get(key)
        if found is None:
            quantity = {
                ("input", False): ACTIVATION_INPUT,
                ("output", False): ACTIVATION_OUTPUT,
                ("input", True): ACTIVATION_GRAD_INPUT,
                ("output", True): ACTIVATION_GRAD_OUTPUT,
            }[side, gradient]
            module = f"{named.name}@{call}" if call else named.name
            name = f"{module}.{side}.{path}" if module else f"{side}.{path}"
            series = Series(name, quantity, micro_step, path, named.name, named.vpp_stage)
            found = self._ids[key] = self.rows.table.series_id(series)
        return found


@dataclass(frozen=True, slots=True)
class _BeforeForward(InertWhenCopied):
    owner: ActivationHooks
    named: NamedModule

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self.owner.guard.run(PART, self.owner.enter, self.named, args, kwargs)


@dataclass(frozen=True, slots=True)
class _AfterForward(InertWhenCopied):
    owner: ActivationHooks
    named: NamedModule

    def __call__(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        if not torch.compiler.is_compiling():
            self.owner.guard.run(PART, self.owner.leave, self.named, output)


@dataclass(frozen=True, slots=True)
class _GradientHook(InertWhenCopied):
    owner: ActivationHooks
    series_id: int
    generation: int

    def __call__(self, gradient: Tensor) -> None:
        if self.generation == self.owner.generation:
            self.owner.guard.run(PART, self.owner.rows.add_shared, self.series_id, gradient)


def _is_training_forward() -> bool:
    """Whether this forward is of a training pass, and not a recomputation inside the backward pass."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
