"""A watched torch model: what of it is read at a step, and when."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trainsentry.collectors.backend import StepListener
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import SeriesTable
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
from trainsentry.collectors.torch.distributed.communication import CollectiveRows
from trainsentry.collectors.torch.distributed.process_groups import known_groups
from trainsentry.collectors.torch.environment import several_ranks
from trainsentry.collectors.torch.graph_capture import GraphCaptures
from trainsentry.collectors.torch.hooks.activations import ActivationHooks
from trainsentry.collectors.torch.hooks.optimizer_steps import OptimizerSteps, watch_scalers
from trainsentry.collectors.torch.parameters.gradients import GradientRows, OptimizedParameters
from trainsentry.collectors.torch.parameters.loss_scale import LossScale
from trainsentry.collectors.torch.parameters.readers import (
    StateCount,
    UpdateReader,
    learning_rate_of,
    read_parameters,
    read_state,
)
from trainsentry.collectors.torch.replaying import Replay
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
)
from trainsentry.collectors.watched_model import WatchedModel, refused_by


class TorchWatch(WatchedModel):
    """Reads a torch model around the steps of its optimizers.

    The order of calls in a step: `open_step`, then `before_update` and `after_update` for each optimizer, then
    `take`. Only `open_step` attaches hooks, and only for the parts that are in the plan.
    """

    communication: CollectiveRows | None = None

    def __init__(self, table: SeriesTable, guard: Guard, settings: CollectSettings) -> None:
        self.rows: StepRows
        self.names: ModelNames
        self._steps: OptimizerSteps | None
        super().__init__(guard, settings, ModelNames(), StepRows(table, settings.eps, refused_by(guard)))
        self.capture = TensorCapture(self.names, guard)
        self._outer: dict[int, OuterOptimizer] = {}
        self._late_wrap_checks: list[LateWrapCheck] = []
        self._replay: Replay | None = None
        self._scale = LossScale()
        self._gradients = GradientRows(self.rows, guard, settings, lambda: self._scale.value(self._device))
        self._updates = UpdateReader(self.rows)
        self._activations = ActivationHooks(self.rows, guard, self.flow, settings)
        self._state_count = StateCount()
        self._optimized = OptimizedParameters(self.names, self._gradients.order)
        self._additions = AddedModules(guard)
        self._captures = GraphCaptures(guard, self._activations.lay_down, self._activations.take_up)

    # ------------------------------------------------------------------ watching

    def add(self, model: Any, optimizer: Any, grad_scaler: Any) -> None:
        """Check and take models and optimizers.

        Raises:
            TypeError: for objects that are not torch modules or optimizers.
            ValueError: for a model without parameters, one that is watched already, an optimizer of another
                model, or a pattern that matches nothing.

        """
        chunks = checked_models(model)
        optimizers = checked_optimizers(optimizer, chunks)
        check_scaler(grad_scaler)
        outer = [each for each in optimizers.values() if each is not None]
        wrappers = [each.optimizer for each in outer]
        check_new(chunks, wrappers, self.names)
        names = self.names.copy()
        names.add(chunks, wrappers)
        self._take_names(names)
        self._additions.note_watched(chunks, wrappers, [o for o, around in optimizers.items() if around is None])
        self.optimizers += optimizers
        self._outer.update({id(each.inner): each for each in outer})
        self._scale.use(grad_scaler, outer)
        if self._listener is not None:
            self.listen(self._listener)
        if several_ranks():
            self._late_wrap_checks += [LateWrapCheck(chunk) for chunk in chunks]
        self._hook_modules()

    def _hook_steps(self, listener: StepListener) -> OptimizerSteps:
        steps = OptimizerSteps(self.optimizers, listener, self._outer, self._captures.captures_step)
        watch_scalers(steps, self._scale.scaler)
        return steps

    def _take_names(self, names: ModelNames) -> None:
        """Watch modules and parameters under these names.

        Raises:
            ValueError: for a pattern that matches nothing.

        """
        self._selections = checked_targets(
            self.settings.targets, [m.name for m in names.modules], [p.name for p in names.parameters]
        )
        self.names.modules, self.names.parameters, self.names.chunks = names.modules, names.parameters, names.chunks
        self._optimized.choose(self._selections)

    def _hook_modules(self) -> None:
        if ACTIVATIONS in self._selections:
            self._activations.choose(self.names.modules, self._selections[ACTIVATIONS].modules)
        if GRADIENTS in self._selections:
            self._gradients.learn_order(self._optimized.selected(GRADIENTS))

    def _follow_additions(self) -> None:
        """Watch modules and parameters too that have come since the last step."""
        names = self._additions.new_names(self.names)
        if names is not None:
            self._take_names(names)
            self._hook_modules()

    def watch_communication(self) -> None:
        """Watch collectives too, but for those of the monitor's own group."""
        reducer = has_reducer(self.names.chunks)
        self.communication = CollectiveRows(
            self.rows, self.guard, self.own_group, self.settings.call_sites, reducer=self.settings.reducer and reducer
        )

    @property
    def _device(self) -> torch.device:
        return self.names.parameters[0].parameter.device

    @property
    def on_host(self) -> bool:
        """Whether every parameter lies on the CPU."""
        return all(p.parameter.device.type == "cpu" for p in self.names.parameters)

    @property
    def takes_boundaries(self) -> bool:
        """Whether the optimizers' steps tell where steps end; those inside a captured graph do not."""
        return bool(self.optimizers) and not self._captures.captured_step

    @property
    def step_has_ended(self) -> bool:
        """Whether the step that `TrainMonitor.step` is told of has ended already: never without an optimizer."""
        return False

    def replay(self) -> Replay:
        """Return what keeps the last forward pass, and runs it again."""
        communication = self.communication
        count = None if communication is None else lambda: communication.calls_so_far
        self._replay = Replay(self.names, self.guard, count, several_ranks=several_ranks())
        return self._replay

    def graph(self) -> dict[str, Any]:
        """Return the content of `graph.json`."""
        return describe(self.names, self.flow, known_groups(self.own_group), data_parallel=self.data_parallel)

    def stop_reading(self) -> None:
        """Remove every hook but those that tell of the optimizers' steps."""
        self._gradients.detach()
        self._activations.close()
        for check in self._late_wrap_checks:
            check.close()
        if self.communication is not None:
            self.communication.close()
        self.capture.close()
        self._captures.close()
        if self._replay is not None:
            self._replay.close()
        self._updates.forget()

    # ------------------------------------------------------------------ one step

    def open_step(self, plan: Plan) -> None:
        """Prepare the next step: attach the hooks that its plan needs."""
        self.guard.run("additions", self._follow_additions)
        self._begin_step(plan)
        self._scale.forget()
        self._activations.open_step(sampling=ACTIVATIONS in plan)
        if self.communication is not None:
            self.communication.open_step(sampling=COMMUNICATION in plan)
        self._gradients.open_step(
            sampling=GRADIENTS in plan,
            selected=lambda: self._optimized.selected(GRADIENTS),
            modules=self.names.modules,
        )

    def before_update(self, optimizer: Optimizer, *, gradients_ready: bool = True) -> None:
        """Read what the coming update works with: gradients, parameters, state; keep weights for the update."""
        turn = self._turn(optimizer)
        self.guard.run(OPTIMIZER_STATE, self._look_for_state, optimizer)
        if gradients_ready:
            self.guard.run(GRADIENTS, self._read_gradients, optimizer)
        if PARAMETERS in self._plan:
            owned = self._optimized.owned(PARAMETERS, optimizer)
            if not self._read:  # weights that no optimizer moves break too: they are read with the first
                owned = [*self._optimized.nobodys(PARAMETERS, self.optimizers), *owned]
            self._read.update(id(p.parameter) for p in owned)
            self.guard.run(PARAMETERS, read_parameters, self.rows, owned, turn)
        if OPTIMIZER_STATE in self._plan:
            self._read_state_of.add(id(optimizer))
            self.guard.run(OPTIMIZER_STATE, self._read_state, optimizer, OPTIMIZER_STATE, turn)
        if UPDATES in self._plan:
            owned = self._optimized.owned(UPDATES, optimizer)
            moving = [p for p in owned if p.parameter.grad is not None or not gradients_ready]
            self.guard.run(UPDATES, self._updates.keep, moving)

    def after_update(self, optimizer: Optimizer, *, gradients_ready: bool = False) -> None:
        """Read what the update did; also the gradients, where a closure computed them inside the step."""
        if gradients_ready:
            self.guard.run(GRADIENTS, self._read_gradients, optimizer)
        if UPDATES in self._plan:
            self.guard.run(UPDATES, self._updates.read, self._turn(optimizer))
        self.guard.run(OPTIMIZER_STATE, self._state_count.updated, optimizer)
        self._optimizer_steps[id(optimizer)] += 1

    def after_part(self, optimizer: Optimizer) -> None:
        """Read what the update of a part of an optimizer's parameters did."""
        if UPDATES in self._plan:
            self.guard.run(UPDATES, self._updates.read, self._turn(optimizer))

    def skipped(self, optimizer: Optimizer) -> None:
        """Read a step that was skipped: as before an update, with none to follow."""
        self.before_update(optimizer)
        if GRADIENTS in self._plan and self._steps is not None and self._steps.gradients:
            selected = self._optimized.selected(GRADIENTS)
            self.guard.run(GRADIENTS, self._gradients.read_refused, selected, self._steps.gradients)
        self._updates.forget()
        self._optimizer_steps[id(optimizer)] += 1

    def without_optimizer(self) -> None:
        """Read a step that ends without any optimizer's call: gradients, parameters and state as they stand."""
        if GRADIENTS in self._plan:
            self.guard.run(GRADIENTS, self._gradients.read, self._optimized.selected(GRADIENTS), None, 0)
        if PARAMETERS in self._plan:
            self.guard.run(PARAMETERS, read_parameters, self.rows, self._optimized.selected(PARAMETERS))
        if OPTIMIZER_STATE in self._plan:
            for optimizer in self.optimizers:
                self.guard.run(OPTIMIZER_STATE, self._read_state, optimizer, OPTIMIZER_STATE)

    @property
    def data_parallel(self) -> bool:
        """Whether every rank is to have data of its own."""
        return any(is_data_parallel(chunk) for chunk in self.names.chunks)

    @property
    def seconds_waited(self) -> float | None:
        """Seconds of this step in which collectives were waited for, as far as they are seen; None where none was."""
        return self.communication.seconds_waited if self.communication is not None else None

    def take_call_order(self) -> int | None:
        """Return a number that stands for the collectives of this step, the same on every rank; None when unknown."""
        return self.communication.take_order() if self.communication is not None else None

    def doing(self) -> dict[str, Any]:
        """Return the collective that is waited in, and those that are open; called from another thread."""
        if self.communication is None:
            return {"waits_for": None, "call": None, "open": []}
        return self.communication.doing()

    def end_step(self) -> None:
        """Complete the rows of the step."""
        self._captures.note_step()
        super().end_step()

    def note_loss_scale(self, scaler: Any) -> None:
        """Take the scaler's current scale as a scalar, without asking the device for its value."""
        if not scaler.is_enabled():
            return
        self._scale.use(scaler)
        scale = self._scale.value(self._device)
        if scale is not None:
            self.log("loss_scale", scale, 0)

    # ------------------------------------------------------------------ pieces

    @property
    def _passes(self) -> ForwardPasses:
        return self._activations.passes

    def _learning_rate(self) -> float | None:
        return learning_rate_of(self.optimizers)

    def _read_parameters(self, parameters: Sequence[NamedParameter]) -> None:
        read_parameters(self.rows, parameters)

    def _read_state(self, optimizer: Optimizer, part: str, turn: int = 0) -> None:
        read_state(self.rows, optimizer, self._optimized.owned(part, optimizer), turn)

    def _look_for_state(self, optimizer: Optimizer) -> None:
        """Where state has gone, read weights and state at this step: by the next sample it may have grown again."""
        if self._plan and self._state_count.are_fewer(optimizer):
            self._plan |= {PARAMETERS, OPTIMIZER_STATE} & set(self._selections)

    def _read_gradients(self, optimizer: Optimizer) -> None:
        if GRADIENTS in self._plan:
            scale = getattr(optimizer, "grad_scale", None)
            self._gradients.read(self._optimized.owned(GRADIENTS, optimizer), scale, self._turn(optimizer))
