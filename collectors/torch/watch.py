"""Watches a torch model: reads its tensors at each step, as the step's plan says."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from trainsentry.collectors.backend import StepListener
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.collectors.settings import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    UPDATES,
    CollectSettings,
    Plan,
)
from trainsentry.collectors.shared.forward_passes import ForwardPasses
from trainsentry.collectors.shared.model_graph import describe
from trainsentry.collectors.targets import checked_targets
from trainsentry.collectors.torch.added_modules import AddedModules
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.device_checks import DeviceChecks, saturates
from trainsentry.collectors.torch.distributed.collective_writes import CollectiveWrites
from trainsentry.collectors.torch.distributed.communication import CollectiveRows
from trainsentry.collectors.torch.distributed.process_groups import known_groups
from trainsentry.collectors.torch.environment import several_ranks
from trainsentry.collectors.torch.graph_capture import GraphCaptures
from trainsentry.collectors.torch.hooks.activations import ActivationHooks
from trainsentry.collectors.torch.hooks.first_passes import FirstPasses
from trainsentry.collectors.torch.hooks.optimizer_arrivals import Arrivals
from trainsentry.collectors.torch.hooks.optimizer_steps import OptimizerSteps, watch_scalers
from trainsentry.collectors.torch.parameters.gradient_reader import gradient_of
from trainsentry.collectors.torch.parameters.gradients import GradientRows, OptimizedParameters, current_gradients
from trainsentry.collectors.torch.parameters.loss_scale import LossScale
from trainsentry.collectors.torch.parameters.model_state import ModelState
from trainsentry.collectors.torch.parameters.readers import (
    UpdateReader,
    learning_rate_of,
    parameters_of,
    read_parameters,
    read_state,
)
from trainsentry.collectors.torch.replaying import Replay
from trainsentry.collectors.torch.rows.gathered_tensors import GatherLimits
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.ddp import has_reducer
from trainsentry.collectors.torch.sharding.late_wrap_check import LateWrapCheck
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter
from trainsentry.collectors.torch.sharding.model_names import ModelNames
from trainsentry.collectors.torch.sharding.registry import is_data_parallel
from trainsentry.collectors.torch.sharding.sharding import OuterOptimizer
from trainsentry.collectors.torch.tensor_capture import TensorCapture
from trainsentry.collectors.torch.validation import (
    check_new,
    check_scaler,
    checked_models,
    checked_optimizers,
    holds_any,
)
from trainsentry.collectors.watched_model import WatchedModel, refused_by


class TorchWatch(WatchedModel):
    """Reads a torch model around the steps of its optimizers.

    The order of calls in a step: `open_step`, then `before_update` and `after_update` for each optimizer, then
    `take`. Only `open_step` attaches hooks, and only for the parts in the plan.
    """

    communication: CollectiveRows | None = None

    def __init__(self, table: SeriesTable, guard: Guard, settings: CollectSettings) -> None:
        self.rows: StepRows
        self.names: ModelNames
        self._steps: OptimizerSteps | None
        limits = GatherLimits(settings.read_together, settings.read_together_bytes)
        rows = StepRows(table, settings.eps, refused_by(guard), limits, settings.histograms)
        super().__init__(guard, settings, ModelNames(), rows)
        self.capture = TensorCapture(self.names, guard)
        self._outer: dict[int, OuterOptimizer] = {}
        self._late_wrap_checks: list[LateWrapCheck] = []
        self._replay: Replay | None = None
        self._scale = LossScale()
        self._device_checks = DeviceChecks(guard, self.log)
        self._first_passes = FirstPasses(guard, lambda n: self._listener.trained_without_step(n))  # noqa: PLW0108 - set later
        self._gradients = GradientRows(
            self.rows, guard, settings, lambda: self._scale.value(self._device), self._first_passes.note
        )
        self._updates = UpdateReader(self.rows)
        self._activations = ActivationHooks(self.rows, guard, self.flow, settings)
        self._inputs, self.operations = self._activations.inputs, self._activations.operations
        self.capture.batches = self._inputs.batches
        self._optimized = OptimizedParameters(self.names, self._gradients.order)
        self.model_state = ModelState(self.rows, guard, settings, self._optimized)
        self._additions = AddedModules(guard)
        self._writes: CollectiveWrites | None = None
        self._awaits_optimizer = self._names_grew = False
        self._adopted = 0
        self._captures = GraphCaptures(guard, self._activations.detach_all, self._activations.reattach)

    # ------------------------------------------------------------------ watching

    def add(self, model: Any, optimizer: Any, grad_scaler: Any) -> None:
        """Check models and optimizers, and watch them.

        Raises:
            TypeError: for objects that are not torch modules, optimizers or loss scalers.
            ValueError: for a model without parameters or already watched, another model's optimizer, an idle pattern.

        """
        chunks = checked_models(model)
        optimizers = checked_optimizers(optimizer, chunks)
        check_scaler(grad_scaler)
        outer = [each for each in optimizers.values() if each is not None]
        holders = [inner if around is None else around.optimizer for inner, around in optimizers.items()]
        check_new(chunks, holders, self.names)
        names = self.names.copy()
        names.add(chunks, holders)
        self._take_names(names)
        self._additions.note_watched(chunks, holders, [o for o, around in optimizers.items() if around is None])
        self.optimizers += optimizers
        self._awaits_optimizer |= not optimizers
        self._outer.update({id(each.inner): each for each in outer})
        self._scale.use(grad_scaler, outer)
        self._hook_all_steps()
        if several_ranks():
            self._late_wrap_checks += [LateWrapCheck(chunk) for chunk in chunks]
            self._writes = self._writes or CollectiveWrites(self.guard, lambda x: self.rows.before_write(x))  # noqa: PLW0108
        self._hook_modules()
        if GRADIENTS not in self._selections:
            self._first_passes.count(self.names.parameters)

    def _hook_steps(self, listener: StepListener) -> OptimizerSteps:
        holds = partial(holds_any, chunks=self.names.chunks)
        arrivals = Arrivals(self.guard, holds, self._take_over, awaited=self._awaits_optimizer)
        steps = OptimizerSteps(
            self.optimizers, listener, self._outer, self._captures.captures_step, self._note_scale, arrivals
        )
        steps.adopted = self._adopted
        try:
            watch_scalers(steps, self._scale.scaler)
        except BaseException:
            steps.close()
            raise
        return steps

    def _take_names(self, names: ModelNames) -> None:
        """Watch the modules and parameters of `names`.

        Raises:
            ValueError: for a pattern that matches nothing.

        """
        self._selections = checked_targets(
            self.settings.targets, [m.name for m in names.modules], [p.name for p in names.parameters]
        )
        self.names.modules, self.names.parameters, self.names.chunks = names.modules, names.parameters, names.chunks
        self._optimized.choose(self._selections)
        self.rows.expect_devices({p.parameter.device for p in names.parameters})

    def adopt(self, settings: CollectSettings) -> None:
        """Read what other settings choose, from the next step on; a pattern that matches nothing is left out.

        Inside compiled graphs, the hooks stay as they were traced.
        """
        self.settings = self.model_state.settings = settings
        self._gradients.adopt(settings)
        self._activations.forward, self._activations.backward = settings.forward, settings.backward
        modules, parameters = [m.name for m in self.names.modules], [p.name for p in self.names.parameters]
        chosen = self._adopted_selections(modules, parameters)
        rehook = chosen.get(ACTIVATIONS) != self._selections.get(ACTIVATIONS)
        self._selections = chosen
        self._optimized.choose(chosen)
        if rehook and ACTIVATIONS in chosen:
            self._activations.choose(self.names.modules, chosen[ACTIVATIONS].modules)

    def _hook_modules(self) -> None:
        if ACTIVATIONS in self._selections:
            self._activations.choose(self.names.modules, self._selections[ACTIVATIONS].modules)
        if GRADIENTS in self._selections:
            self._gradients.learn_order(self._optimized.selected(GRADIENTS))

    def _take_over(self, optimizer: Optimizer) -> None:
        """Watch an optimizer that comes after `watch`, at its first step."""
        self.optimizers.append(optimizer)
        self._adopted += 1
        known = self.names.by_parameter()
        self._additions.note_optimizer(optimizer)
        if any(p not in known for p in parameters_of(optimizer)):
            self._take_names(self._additions.all_names())
            self._names_grew = True
        else:
            self._optimized.choose(self._selections)

    def _follow_additions(self) -> None:
        """Watch modules and parameters that were added since the last step."""
        names = self._additions.new_names(self.names)
        if names is not None:
            self._take_names(names)
        if names is not None or self._names_grew:
            self._names_grew = False
            self._hook_modules()

    def _note_scale(self) -> None:
        """Read the loss scale before an outer optimizer's step changes it."""
        if GRADIENTS in self._plan:
            self.guard.run(GRADIENTS, self._scale.value, self._device)

    def watch_communication(self) -> None:
        """Watch collectives too, except those of the monitor's own group; once."""
        if self.communication is not None:
            return
        reducer, sites = self.settings.reducer and has_reducer(self.names.chunks), self.settings.call_sites
        self.communication = CollectiveRows(self.rows, self.guard, self.own_group, sites, reducer=reducer)

    @property
    def _device(self) -> torch.device:
        return self.names.parameters[0].parameter.device

    @property
    def on_host(self) -> bool:
        """Whether every parameter is in host memory."""
        return all(device_of(p.parameter).on_host for p in self.names.parameters)

    @property
    def saturates(self) -> bool:
        """Whether a parameter's device stores the largest finite value where a result overflows."""
        return saturates(self.names.parameters)

    @property
    def takes_boundaries(self) -> bool:
        """Whether the optimizers' calls mark the ends of steps; calls inside a captured graph do not."""
        return bool(self.optimizers) and not self.adopted_only and not self._captures.captured_step

    @property
    def step_has_ended(self) -> bool:
        """Whether an optimizer's call has already ended the step that `TrainMonitor.step` marks: never."""
        return False

    def replay(self) -> Replay:
        """Return a `Replay` of the last forward pass."""
        communication = self.communication
        count = None if communication is None else lambda: communication.calls_so_far
        self._replay = Replay(self.names, self.guard, count, several_ranks=several_ranks())
        return self._replay

    def graph(self) -> dict[str, Any]:
        """Return the content of `graph.json`."""
        return describe(self.names, self.flow, known_groups(self.own_group), data_parallel=self.data_parallel)

    def stop_reading(self) -> None:
        """Remove every hook except those on the optimizers' steps."""
        self._first_passes.end()
        self._gradients.detach()
        self._activations.close()
        self.model_state.close()
        self._inputs.batches.clear()
        for check in self._late_wrap_checks:
            check.close()
        if self._writes is not None:
            self._writes.remove()
        if self.communication is not None:
            self.communication.close()
        self.capture.close()
        self._captures.close()
        if self._replay is not None:
            self._replay.close()
        self._updates.forget()

    # ------------------------------------------------------------------ one step

    def open_step(self, plan: Plan) -> None:
        """Attach the hooks that the next step's plan needs."""
        self.guard.run("additions", self._follow_additions)
        self._begin_step(plan)
        self._scale.forget()
        self.model_state.open_step()
        if ACTIVATIONS in plan:  # and each time, as a model may have been moved
            self.rows.expect_devices({p.parameter.device for p in self.names.parameters})
        self._activations.open_step(sampling=ACTIVATIONS in plan, inputs=self.in_window)
        if self.communication is not None:
            self.communication.open_step(sampling=COMMUNICATION in plan)
        self._gradients.open_step(
            sampling=GRADIENTS in plan,
            selected=lambda: self._optimized.selected(GRADIENTS),
            modules=self.names.modules,
        )

    def before_update(self, optimizer: Optimizer, *, gradients_ready: bool = True) -> None:
        """Read gradients, parameters and optimizer state before an update; copy the weights that it will change."""
        micro_step = self._micro_step_of(optimizer)
        self.guard.run(ACTIVATIONS, self.rows.read_gathered)  # an activation may share the memory of a weight
        if self.in_window:
            self.model_state.read_options(optimizer)
            if gradients_ready:
                self.model_state.look_for_unheld(optimizer, self.optimizers)
                replayed = self._captures.has_replayed
                self.model_state.count_writes(optimizer, self._passes.micro_steps, is_replayed=replayed)
        if self._plan and self.model_state.has_lost_state(optimizer):  # before the next sample it may be rebuilt
            self._plan |= {PARAMETERS, OPTIMIZER_STATE} & set(self._selections)
        if gradients_ready:
            self.guard.run(GRADIENTS, self._read_gradients, optimizer)
        self.model_state.read_weights(self._plan, optimizer, micro_step, self._read, self.optimizers)
        self.model_state.read_state(self._plan, optimizer, micro_step, self._read_state_of)
        if UPDATES in self._plan:
            owned = self._optimized.owned(UPDATES, optimizer)
            moving = [p for p in owned if gradient_of(p.parameter) is not None or not gradients_ready]
            self.guard.run(UPDATES, self._updates.keep, moving, micro_step)
        if self.in_window:
            self.model_state.begin_writes(optimizer, self._optimized.owned("", optimizer))

    def read_gradients(self, optimizer: Optimizer) -> None:
        """Read the gradients that a closure has computed since `before_update`."""
        self.guard.run(GRADIENTS, self._read_gradients, optimizer)

    def after_update(self, optimizer: Optimizer, *, gradients_ready: bool = False) -> None:
        """Read how an update changed the weights; also the gradients, where a closure computed them in the step."""
        if gradients_ready:
            self.guard.run(GRADIENTS, self._read_gradients, optimizer)
            if self.in_window:
                self.model_state.look_for_unheld(optimizer, self.optimizers)
        self.after_part(optimizer)
        self.model_state.updated(self._plan, optimizer, self._micro_step_of(optimizer))
        self._optimizer_steps[id(optimizer)] += 1

    def after_part(self, optimizer: Optimizer) -> None:
        """Read how an update of some of an optimizer's parameters changed them."""
        self._note_update()
        if UPDATES in self._plan:
            self.guard.run(UPDATES, self._updates.read, self._micro_step_of(optimizer))

    def skipped(self, optimizer: Optimizer) -> None:
        """Read a skipped step: everything that is read before an update, and no update."""
        self.before_update(optimizer)
        if GRADIENTS in self._plan and self._steps is not None and self._steps.gradients:
            selected = self._optimized.selected(GRADIENTS)
            self.guard.run(GRADIENTS, self._gradients.read_refused, selected, self._steps.gradients)
        self._updates.forget()
        self._optimizer_steps[id(optimizer)] += 1

    def without_optimizer(self) -> None:
        """Read a step that ends without an optimizer's call: the current gradients, parameters and optimizer state."""
        if GRADIENTS in self._plan:
            self.guard.run(GRADIENTS, self._gradients.read, self._optimized.selected(GRADIENTS), None, 0)
        selected = self._optimized.selected(PARAMETERS) if PARAMETERS in self._plan else []
        self.model_state.read_without_optimizer(self._plan, selected, self.optimizers)

    @property
    def data_parallel(self) -> bool:
        """Whether each rank trains on its own data."""
        return any(is_data_parallel(chunk) for chunk in self.names.chunks)

    def current_gradients(self) -> list[tuple[Series, Any]]:
        """Return the gradients that parameters hold now, each this rank's part."""
        return current_gradients(self._optimized.selected(GRADIENTS) if GRADIENTS in self._selections else [])

    def end_step(self) -> None:
        """Complete the rows of the step."""
        self._first_passes.end()
        self._captures.note_step()
        self._device_checks.read(self.names.parameters)
        super().end_step()

    def note_loss_scale(self, scaler: Any) -> None:
        """Append the scaler's current scale as a scalar, without waiting for the device."""
        if not scaler.is_enabled():
            return
        self._scale.use(scaler)
        if (scale := self._scale.value(self._device)) is not None:
            self.log("loss_scale", scale, 0)

    # ------------------------------------------------------------------ pieces

    def _note_update(self) -> None:
        if self._replay is not None:
            self._replay.note_update()

    @property
    def _passes(self) -> ForwardPasses:
        return self._activations.passes

    def _learning_rate(self) -> float | None:
        return learning_rate_of(self.optimizers)

    def _read_parameters(self, parameters: Sequence[NamedParameter]) -> None:
        read_parameters(self.rows, parameters)

    def _read_state(self, optimizer: Optimizer, part: str, micro_step: int = 0) -> None:
        read_state(self.rows, optimizer, self._optimized.owned(part, optimizer), micro_step)

    def _read_gradients(self, optimizer: Optimizer) -> None:
        if GRADIENTS in self._plan:
            owned, scale = self._optimized.owned(GRADIENTS, optimizer), getattr(optimizer, "grad_scale", None)
            self._gradients.read(owned, scale, self._micro_step_of(optimizer))
