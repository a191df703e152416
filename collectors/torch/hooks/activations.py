"""Reads modules' inputs and outputs, and their gradients, through forward hooks and tensor hooks."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trainsentry.collectors.guard import Guard, InertWhenCopied
from trainsentry.collectors.settings import CollectSettings
from trainsentry.collectors.shared.forward_passes import MAX_CALLS, MAX_MICRO_STEPS, ForwardPasses
from trainsentry.collectors.shared.model_graph import DataFlow, NamedModule
from trainsentry.collectors.torch.hooks.active_modes import changes_operations
from trainsentry.collectors.torch.hooks.backward_pass import in_backward
from trainsentry.collectors.torch.hooks.compiled_activations import CompiledVisits, Site
from trainsentry.collectors.torch.hooks.compiler import (
    TRACES_GRADIENTS,
    allow_for_hooks,
    backward_is_compiled,
    has_compiled,
    is_compiled,
    left_out,
)
from trainsentry.collectors.torch.hooks.model_inputs import TorchInputs
from trainsentry.collectors.torch.hooks.module_hooks import ModuleHooks, Switch, can_be_called, stay_out_of_graphs
from trainsentry.collectors.torch.hooks.nested_tensors import tensors_in, tensors_in_call
from trainsentry.collectors.torch.hooks.recomputed_calls import RecomputedCalls
from trainsentry.collectors.torch.hooks.repeated_calls import RepeatedCalls
from trainsentry.collectors.torch.hooks.unrecorded_activations import (
    warn_of_compiled_autograd,
    warn_of_compiled_modules,
    warn_of_gradients_in_graphs,
    warn_of_old_torch,
    warn_of_uncalled_modules,
)
from trainsentry.collectors.torch.operations.operation_changes import OperationChanges
from trainsentry.collectors.torch.passes.entrances import Entrances
from trainsentry.collectors.torch.passes.gradient_products import GradientProducts
from trainsentry.collectors.torch.passes.unfilled_passes import runs_on_unfilled_memory
from trainsentry.collectors.torch.rows.step_rows import StepRows

PART = "activations"


class ActivationHooks:
    """Hooks modules, and reads their inputs and outputs in the sampled steps.

    A forward pass counts if gradients are enabled when its outermost module is entered, so evaluation under `no_grad`
    has no rows. A forward that is recomputed in the backward pass has none either; only the gradients of calls that
    had no graph the first time (those inside a reentrant checkpoint) are read then.

    Eager modules have hooks only in sampled steps, but for the roots, whose inputs are read at every step. Modules that
    a compiler has inlined keep their hooks, even after `close`: the hooks are part of its graphs, one with sampling and
    one without, which `switch` selects, and adding or removing a hook would recompile them. The first step hooks every
    module: inlined modules never run eagerly in it.
    """

    def __init__(self, rows: StepRows, guard: Guard, flow: DataFlow, settings: CollectSettings) -> None:
        self.rows = rows
        self.guard = guard
        self.flow = flow
        self.forward = settings.forward
        self.backward = settings.backward
        self.inputs = TorchInputs(rows, every_step=settings.inputs and settings.forward)
        self.switch = Switch(
            forward=self.forward,
            backward=self.backward and TRACES_GRADIENTS,
            inside_graphs=settings.inside_graphs,
        )
        self.generation = 0
        self.compiled: set[str] = set()
        self.eager: set[str] = set()
        self._left_out_before: Counter[str] = Counter()
        self._hooked_gradients = self._gradients_came = False
        self._modules: Sequence[NamedModule] = ()
        self._observed: frozenset[str] = frozenset()
        self._hooks: ModuleHooks | None = None
        self._attached = False
        self._leaf_handles: list[RemovableHandle] = []
        self.passes = ForwardPasses(rows.table)
        self.entrances = Entrances()
        self._recomputed = RecomputedCalls()
        self._repeated = RepeatedCalls(rows, guard, enabled=settings.recompute)
        self._products = GradientProducts(rows, guard, _may_look, enabled=settings.recompute and settings.backward)
        self.operations = OperationChanges(rows, guard, enabled=settings.operations)
        self._visits = CompiledVisits()
        self._inner_ran = False

    def choose(self, modules: Sequence[NamedModule], observed: frozenset[str]) -> None:
        """Hook the `observed` modules, and the roots, whose passes are the micro-steps.

        TorchScript modules take no hooks and are left out.
        """
        self.close()
        self._modules, self._observed = modules, observed
        self._left_out_before = left_out.copy()
        allow_for_hooks()
        if not stay_out_of_graphs(m.module for m in modules):
            warn_of_old_torch(self.guard)
            return
        hooked = [m for m in modules if (m.name in observed or not m.name) and can_be_called(m.module)]
        self._repeated.choose_among(hooked)
        self._products.choose_among(hooked)
        self._hooks = ModuleHooks(self, self.switch, hooked, observed)
        self.switch = self._hooks.switch
        self._attach()

    def open_step(self, *, sampling: bool, inputs: bool = False) -> None:
        """Begin a step; read activations in it if `sampling`, and the model's inputs in any case if `inputs`."""
        self.inputs.open_step(reading=inputs)
        if self.sampling:
            self.entrances.end_step()
        if self.sampling and (not self._inner_ran or self.flow.passes.bit_count() == 1):
            self._warn_unseen_modules()  # rarely: after sampled steps 1, 2, 4, 8, …
        self.generation += 1
        self.switch.sampling = sampling
        self._inner_ran = False
        self.passes.open_step()
        self._recomputed.clear()
        self._repeated.open_step(sampling=sampling)
        self._products.open_step(sampling=sampling)
        self._visits.clear()
        self._drop_leaf_hooks()
        if sampling:
            self.flow.begin()
            self._attach()
        elif self._attached and (self.flow.passes or self.flow.seen):
            self._detach(keep_inlined=True)  # once: later unsampled steps read no module

    @property
    def sampling(self) -> bool:
        """Whether this step is sampled."""
        return self.switch.sampling

    def close(self) -> None:
        """Remove every hook except those inside graphs; these and the step's tensor hooks do nothing from now on."""
        self.generation += 1
        self.switch.sampling = False
        self._repeated.close()
        self._products.close()
        self._drop_leaf_hooks()
        self._detach(keep_inlined=has_compiled(), closing=True)
        if self._hooks is not None:
            self._hooks.release()
        self._hooks = None

    def detach_all(self) -> None:
        """Remove every hook until `reattach`."""
        self._detach(keep_inlined=False)

    def reattach(self) -> None:
        """Attach the hooks that this step needs."""
        if self.sampling or not self.eager:
            self._attach()

    def _attach(self) -> None:
        self._attached = True
        if self._hooks is not None:
            self._hooks.attach()

    def _detach(self, *, keep_inlined: bool, closing: bool = False) -> None:
        """Remove hooks, except those that may be part of a graph; at `closing`, of a known graph."""
        self._attached = False
        compiled = [m for m in self._modules if is_compiled(m.module)] if closing else []
        inside = tuple(f"{m.name}." if m.name else "" for m in compiled)
        fused = bool(left_out - self._left_out_before)

        def stays(named: NamedModule) -> bool:
            if not keep_inlined or named.name in self.compiled:
                return keep_inlined
            if self.entrances.is_one(named) and not closing and self.inputs.every_step:
                return True
            if named.name in self.eager:
                return False
            return not closing or fused or bool(self.compiled) or f"{named.name}.".startswith(inside)

        if self._hooks is not None:
            self._hooks.detach(stays)

    def _warn_unseen_modules(self) -> None:
        """Warn about modules without any recorded activation, and about gradients that this torch cannot show."""
        if self.compiled and self.backward and not TRACES_GRADIENTS:
            warn_of_gradients_in_graphs(self.guard)
        if self._hooked_gradients and not self._gradients_came and backward_is_compiled():
            warn_of_compiled_autograd(self.guard)
        hooked = [m for m in self._hooks.modules if m.name] if self._hooks is not None else []
        if not has_compiled():
            if self.flow.passes == 2:
                warn_of_uncalled_modules(self.guard, hooked, self.flow.seen)
            return
        if self._inner_ran:
            inside = tuple(f"{m.name}." if m.name else "" for m in self._modules if is_compiled(m.module))
            known = self.flow.seen | self.compiled
            hooked = [m for m in hooked if f"{m.name}.".startswith(inside) and m.name not in known]
        if hooked:
            warn_of_compiled_modules(self.guard, hooked, sorted(left_out - self._left_out_before))

    def note_gradient(self) -> None:
        """Note that the backward pass runs gradient hooks."""
        self._gradients_came = True

    def _drop_leaf_hooks(self) -> None:
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()

    @property
    def attached(self) -> int:
        """The number of modules with hooks."""
        return self._hooks.attached if self._hooks is not None else 0

    def enter(self, named: NamedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that a module is entered, and read its inputs."""
        self.flow.entered(named.name)
        if not self.switch.sampling:
            if self.entrances.is_one(named) and not in_backward():
                self._read_inputs(named, args, kwargs)
            return
        if in_backward():  # a recomputed forward may end without `leave`
            self._enter_recomputed(named, tensors_in_call(args, kwargs))
            return
        if torch.is_grad_enabled():
            self._recomputed.with_graph()
        self._inner_ran |= bool(named.name)
        if self.passes.begins_with(named):
            self._begin_pass(named, training=torch.is_grad_enabled() and not runs_on_unfilled_memory())
            self._note_pass(named, tensors_in_call(args, kwargs))
            first = self.passes.is_first and not changes_operations()
            self.operations.begin(named, tensors_in_call(args, kwargs), reading=first)
        elif self.passes.recording:
            self.entrances.note_inner(named)
        self.passes.enter()
        self.operations.enter(named)
        if self.passes.recording and named.name in self._observed:
            self._observe(named, "input", tensors_in_call(args, kwargs))
            if self.entrances.is_one(named):
                self.inputs.read(named, tensors_in_call(args, kwargs), self.passes, sampling=True)
        if self.passes.recording:
            self._repeated.enter(named, args, kwargs)
            self._products.enter(named, tensors_in_call(args, kwargs))
        if getattr(named.module, "inplace", False):
            self.rows.read_gathered()

    def _read_inputs(self, named: NamedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Read the model's own inputs in a step that samples no activations."""
        self.passes.begin(named, training=torch.is_grad_enabled() and not runs_on_unfilled_memory())
        self._note_pass(named, ())
        if self.passes.recording and named.name in self._observed:
            self.inputs.read(named, tensors_in_call(args, kwargs), self.passes, sampling=False)

    def _note_pass(self, named: NamedModule, given: Iterable[tuple[str, Tensor]]) -> None:
        """Note where a pass of training begins, or that one without gradients does."""
        if not torch.is_grad_enabled():
            if self.entrances.may_be_one(named):
                self.inputs.note_without_gradients(named)
        elif self.passes.recording:
            self.entrances.note(named, (tensor for _, tensor in given), self.flow)

    def leave(self, named: NamedModule, output: Any) -> None:
        """Note that a module is left, and read its outputs."""
        if not self.switch.sampling:
            return
        if in_backward():
            self._leave_recomputed(named, tensors_in(output))
            return
        self.passes.leave()
        self.operations.leave(tensors_in(output))
        if self.passes.recording and named.name in self._observed:
            self._observe(named, "output", tensors_in(output))
            self._repeated.leave(named, output)
            self._products.leave(named, output)
            self.passes.called(named)

    def _begin_pass(self, named: NamedModule, *, training: bool) -> None:
        """Note that an outermost module is entered."""
        self.rows.read_gathered()  # a captured graph overwrites its outputs at its next replay
        self._visits.begin_pass()
        self.passes.begin(named, training=training)

    def _observe(self, named: NamedModule, side: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        call, with_graph = self.passes.call_of(named), torch.is_grad_enabled()
        if side == "output" and not with_graph:
            self._recomputed.made(named, None if call is None else (self.passes.micro_step, call))
        if call is None:
            return
        for path, tensor in tensors:
            if side == "output":
                self.flow.produced(named.name, tensor)
            else:
                self.flow.consumed(named.name, tensor)
            if self.forward:
                series_id = self.passes.series(named, side, path, call, self.passes.micro_step, gradient=False)
                self.rows.add_shared(series_id, tensor)
            if with_graph:
                self._hook_gradient(named, side, path, tensor, self.passes.micro_step, call)

    def _enter_recomputed(self, named: NamedModule, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Hook the input gradients of a recomputed call that had no graph the first time."""
        if torch.is_grad_enabled():
            self._recomputed.with_graph()
        place = self._recomputed.entered(named) if named.name in self._observed else None
        if place is not None and torch.is_grad_enabled():
            for path, tensor in tensors:
                self._hook_gradient(named, "input", path, tensor, *place)

    def _leave_recomputed(self, named: NamedModule, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Hook the output gradients of a recomputed call; one without a graph yet will be recomputed again."""
        place = self._recomputed.left(named)
        if place is None:
            return
        if not torch.is_grad_enabled():
            self._recomputed.made(named, place)
            return
        for path, tensor in tensors:
            self._hook_gradient(named, "output", path, tensor, *place)

    def _hook_gradient(
        self, named: NamedModule, side: str, path: str, tensor: Tensor, micro_step: int, call: int
    ) -> None:
        if not (self.backward and tensor.requires_grad):
            return
        series_id = self.passes.series(named, side, path, call, micro_step, gradient=True)
        self._hooked_gradients = True
        handle = tensor.register_hook(_GradientHook(self, series_id, self.generation))
        if tensor.is_leaf:  # freeing the graph frees the hooks of other tensors
            self._leaf_handles.append(handle)

    def compiled_pass(self, named: NamedModule) -> None:
        """Begin a pass through a compiled outermost module."""
        self.compiled.add(named.name)
        self.flow.entered(named.name)
        if not named.name:
            self.entrances.note(named, (), self.flow)
        if self.sampling and not in_backward():
            self.guard.run(PART, lambda: self._begin_pass(named, training=True))

    def compiled_tensor(self, site: Site, path: str, tensor: Tensor, *, hooked: bool) -> None:
        """Read an input or output inside a compiled graph."""
        self._inner_ran = self._inner_ran or bool(site.named.name)
        if site.named.name not in self.compiled:
            self.compiled.add(site.named.name)
            self.flow.entered(site.named.name)
        if self.sampling and self.passes.recording and not in_backward():
            self.guard.run(PART, self._take_compiled, site, path, tensor, hooked)

    def compiled_gradient(self, site: Site, path: str, gradient: Tensor) -> None:
        """Read the gradient of an input or output inside a compiled graph."""
        if self.sampling:
            self.guard.run(PART, self._take_compiled_gradient, site, path, gradient)

    def _take_compiled(self, site: Site, path: str, tensor: Tensor, hooked: bool) -> None:
        call = self._visits.forward(site, path, hooked=hooked)
        if call >= MAX_CALLS:
            self.passes.left_out += 1
            return
        if not self.forward:
            return
        side, _, within = path.partition(".")
        # Compilers reuse buffers without changing the tensor's version, so a tensor read before may hold new values.
        self.rows.add(
            self.passes.series(site.named, side, within, call, self.passes.micro_step, gradient=False), tensor
        )

    def _take_compiled_gradient(self, site: Site, path: str, gradient: Tensor) -> None:
        micro_step, call = self._visits.backward(site, path)
        if call < MAX_CALLS and micro_step < MAX_MICRO_STEPS:
            side, _, within = path.partition(".")
            self.rows.add(self.passes.series(site.named, side, within, call, micro_step, gradient=True), gradient)


def _may_look() -> bool:
    """Whether the gradients that a node computes may be looked at: a hook on it is part of a compiled graph."""
    return not (changes_operations() or backward_is_compiled())


@dataclass(slots=True, eq=False)  # not frozen: that takes three times as long to make
class _GradientHook(InertWhenCopied):
    owner: ActivationHooks
    series_id: int
    generation: int

    def __call__(self, gradient: Tensor) -> None:
        if torch.compiler.is_compiling():  # compiled autograd would make `generation` a constant
            return
        if self.generation == self.owner.generation:
            self.owner.note_gradient()
            self.owner.guard.run(PART, self.owner.rows.add_shared, self.series_id, gradient)
