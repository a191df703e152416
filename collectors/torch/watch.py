"""A watched torch model: what of it is read at a step, and when."""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

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
from trainsentry.collectors.shared.host_rows import PendingRows
from trainsentry.collectors.shared.model_graph import DataFlow, describe
from trainsentry.collectors.shared.scalar_rows import ScalarRows, TrainingModes
from trainsentry.collectors.targets import Selection, checked_targets
from trainsentry.collectors.torch.added_modules import AddedModules
from trainsentry.collectors.torch.distributed.communication import CollectiveRows
from trainsentry.collectors.torch.distributed.process_groups import known_groups
from trainsentry.collectors.torch.environment import several_ranks
from trainsentry.collectors.torch.graph_capture import GraphCaptures
from trainsentry.collectors.torch.hooks.activations import ActivationHooks
from trainsentry.collectors.torch.hooks.optimizer_steps import OptimizerSteps, StepListener, watch_scalers
from trainsentry.collectors.torch.parameters.gradient_rows import GradientRows
from trainsentry.collectors.torch.parameters.loss_scale import LossScale
from trainsentry.collectors.torch.parameters.optimized_parameters import OptimizedParameters
from trainsentry.collectors.torch.parameters.readers import (
    ParameterSeries,
    StateCount,
    UpdateReader,
    learning_rate_of,
    read_parameters,
    read_state,
)
from trainsentry.collectors.torch.replaying import Replay
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.late_wrap_check import FirstPass, is_data_parallel
from trainsentry.collectors.torch.sharding.model_names import ModelNames
from trainsentry.collectors.torch.tensor_capture import TensorCapture
from trainsentry.collectors.torch.validation import (
    check_new,
    check_scaler,
    checked_models,
    checked_optimizers,
)


class TorchWatch:
    """Reads a torch model around the steps of its optimizers.

    The order of calls in a step: `open_step`, then `before_update` and `after_update` for each optimizer, then
    `take`. Only `open_step` attaches hooks, and only for the parts that are in the plan.
    """

    def __init__(self, table: SeriesTable, guard: Guard, settings: CollectSettings) -> None:
        self.guard = guard
        self.settings = settings
        self.names = ModelNames()
        self.optimizers: list[Optimizer] = []
        self._outer: dict[int, Any] = {}
        self._first_passes: list[FirstPass] = []
        self.communication: CollectiveRows | None = None
        self.own_group = ""
        self.flow = DataFlow()
        self.rows = StepRows(table, settings.eps, self._refused)
        self.capture = TensorCapture(self.names, guard)
        self._replay: Replay | None = None
        self._selections: dict[str, Selection] = {}
        self._steps: OptimizerSteps | None = None
        self._series = ParameterSeries(self.rows)
        self._scale = LossScale()
        self._gradients = GradientRows(self._series, guard, settings, lambda: self._scale.value(self._device))
        self._updates = UpdateReader(self._series)
        self._activations = ActivationHooks(self.rows, guard, self.flow, settings)
        self._optimizer_steps: Counter[int] = Counter()
        self._scalars = ScalarRows(self.rows)
        self._modes = TrainingModes(self.names, self.rows)
        self._read: set[nn.Parameter] = set()
        self._read_state_of: set[int] = set()
        self._entries = StateCount()
        self._plan: Plan = frozenset()
        self._optimized = OptimizedParameters(self.names, self._gradients.order)
        self._additions = AddedModules(guard)
        self._captures = GraphCaptures(guard, self._activations.lay_down, self._activations.take_up)

    # ------------------------------------------------------------------ watching

    def add(self, model: Any, optimizer: Any, grad_scaler: Any, listener: StepListener) -> None:
        """Check and take models and optimizers, and listen to the optimizers' steps.

        Raises:
            TypeError: for objects that are not torch modules or optimizers.
            ValueError: for a model without parameters, one that is watched already, an optimizer of another
                model, or a pattern that matches nothing.

        """
        chunks = checked_models(model)
        optimizers = checked_optimizers(optimizer, chunks)
        check_scaler(grad_scaler)
        wrappers = [outer for outer in optimizers.values() if outer is not None]
        check_new(chunks, wrappers, self.names)
        names = self.names.copy()
        names.add(chunks, wrappers)
        self._take_names(names)
        self._additions.note_watched(chunks, wrappers, [o for o, outer in optimizers.items() if outer is None])
        self.optimizers += optimizers
        self._outer.update({id(inner): outer for inner, outer in optimizers.items() if outer is not None})
        self._scale.use(grad_scaler, wrappers)
        if self._steps is not None:
            self._steps.close()
        self._steps = OptimizerSteps(self.optimizers, listener, self._outer, self._captures.captures_step)
        watch_scalers(self._steps, self._scale.scaler)
        if several_ranks():
            self._first_passes += [FirstPass(chunk) for chunk in chunks]
        self._hook_modules()

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
        reducer = any(
            isinstance(m, nn.parallel.DistributedDataParallel) for chunk in self.names.chunks for m in chunk.modules()
        )
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

    def close(self) -> None:
        """Remove every hook and patch."""
        if self._steps is not None:
            self._steps.close()
        self.stop_reading()

    def stop_reading(self) -> None:
        """Remove every hook but those that tell of the optimizers' steps."""
        self._gradients.detach()
        self._activations.close()
        for check in self._first_passes:
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
        self._plan = plan
        self._scale.forget()
        self._optimizer_steps.clear()
        self._read.clear()
        self._read_state_of.clear()
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
            self._read.update(p.parameter for p in owned)
            self.guard.run(PARAMETERS, read_parameters, self._series, owned, turn)
        if OPTIMIZER_STATE in self._plan:
            self._read_state_of.add(id(optimizer))
            owned = self._optimized.owned(OPTIMIZER_STATE, optimizer)
            self.guard.run(OPTIMIZER_STATE, read_state, self._series, optimizer, owned, turn)
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
        self.guard.run(OPTIMIZER_STATE, self._entries.updated, optimizer)
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
            self.guard.run(PARAMETERS, read_parameters, self._series, self._optimized.selected(PARAMETERS))
        if OPTIMIZER_STATE in self._plan:
            for optimizer in self.optimizers:
                owned = self._optimized.owned(OPTIMIZER_STATE, optimizer)
                self.guard.run(OPTIMIZER_STATE, read_state, self._series, optimizer, owned, 0)

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
        if UPDATES in self._plan:
            self.guard.run(UPDATES, self._note_updates)
        if ACTIVATIONS in self._plan or PARAMETERS in self._plan:
            self.guard.run("training_mode", self._modes.read)
        self._scalars.end_step()
        if self.communication is not None:
            self.guard.run(COMMUNICATION, self.communication.end_step)

    def examine(self) -> None:
        """Read, out of turn, every parameter and all optimizer state that has not been read in this step."""
        unread = [p for p in self.names.parameters if p.parameter not in self._read]
        self._read.update(p.parameter for p in unread)
        self.guard.run(PARAMETERS, read_parameters, self._series, unread)
        for optimizer in self.optimizers:
            if id(optimizer) not in self._read_state_of:
                self._read_state_of.add(id(optimizer))
                self.guard.run(
                    OPTIMIZER_STATE, read_state, self._series, optimizer, self._optimized.owned("", optimizer)
                )

    def log(self, name: str, value: Any, micro_step: int) -> None:
        """Append a scalar."""
        self._scalars.log(name, value, micro_step)

    def note_loss_scale(self, scaler: Any) -> None:
        """Take the scaler's current scale as a scalar, without asking the device for its value."""
        if not scaler.is_enabled():
            return
        self._scale.use(scaler)
        scale = self._scale.value(self._device)
        if scale is not None:
            self.log("loss_scale", scale, 0)

    @property
    def micro_steps(self) -> int:
        """Micro-steps that were seen in this step; 0 when activations were not sampled."""
        return self._activations.micro_steps if ACTIVATIONS in self._plan else 0

    @property
    def left_out(self) -> int:
        """Passes and calls that were beyond what a record holds."""
        return self._activations.left_out + (self.communication.left_out if self.communication is not None else 0)

    def take(self) -> PendingRows:
        """Return the rows of the step, or of its part since the last call."""
        return self.rows.take()

    # ------------------------------------------------------------------ pieces

    def _refused(self, error: Exception) -> None:
        """Note that a tensor could not be read: it costs its own row and no other."""
        if self.guard.strict:
            raise error
        self.guard.refuse("statistics of a tensor", error)

    def _note_updates(self) -> None:
        moved, self._updates.moved = self._updates.moved, 0
        self._scalars.updates(moved, learning_rate_of(self.optimizers))

    def _look_for_state(self, optimizer: Optimizer) -> None:
        """Where state has gone, read weights and state at this step: by the next sample it may have grown again."""
        if self._plan and self._entries.are_fewer(optimizer):
            self._plan |= {PARAMETERS, OPTIMIZER_STATE} & set(self._selections)

    def _turn(self, optimizer: Optimizer) -> int:
        """Return how often an optimizer has stepped before in this step: its rows' micro-step."""
        return self._optimizer_steps[id(optimizer)]

    def _read_gradients(self, optimizer: Optimizer) -> None:
        if GRADIENTS in self._plan:
            scale = getattr(optimizer, "grad_scale", None)
            self._gradients.read(self._optimized.owned(GRADIENTS, optimizer), scale, self._turn(optimizer))


def follow(model: Any, optimizer: Any, grad_scaler: Any, listener: StepListener) -> OptimizerSteps:
    """Tell `listener` of the optimizers' steps, after the checks of `watch`.

    Raises:
        TypeError, ValueError: as `watch` does.

    """
    optimizers = checked_optimizers(optimizer, checked_models(model))
    check_scaler(grad_scaler)
    outer = {id(inner): wrapper for inner, wrapper in optimizers.items() if wrapper is not None}
    steps = OptimizerSteps(list(optimizers), listener, outer)
    watch_scalers(steps, grad_scaler)
    return steps
