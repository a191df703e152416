"""Watches a MindSpore model: reads its tensors at each step, as the step's plan says."""

from collections.abc import Sequence
from typing import Any

from trainsentry.collectors.backend import StepListener
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.hooks.activations import CellCalls
from trainsentry.collectors.mindspore.hooks.communication import CollectiveRows
from trainsentry.collectors.mindspore.hooks.optimizer_steps import (
    OptimizerSteps,
    ScalerWatch,
    check_scaler,
)
from trainsentry.collectors.mindspore.rows.cell_names import CellNames, NamedParameter
from trainsentry.collectors.mindspore.rows.parameters import (
    Owned,
    ParameterReader,
    UpdateReader,
    learning_rate_of,
    parameters_of,
)
from trainsentry.collectors.mindspore.rows.step_rows import StepRows
from trainsentry.collectors.mindspore.runtime import (
    in_graph_mode,
    is_data_parallel,
    on_host,
    rank_and_world_size,
    saturates,
    wait,
)
from trainsentry.collectors.mindspore.tensor_capture import TensorCapture
from trainsentry.collectors.mindspore.validation import check_new, checked_models, checked_optimizers
from trainsentry.collectors.series import PARAMETER_UPDATED, SeriesTable
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
from trainsentry.collectors.watched_model import WatchedModel, refused_by


class MindSporeWatch(WatchedModel):
    """Reads a MindSpore model around the steps of its optimizers.

    In compiled steps no call is intercepted: `TrainMonitor.step` is the step boundary, weights and state are read from
    the parameters, and an update is the difference from the weights at the end of the previous step.
    """

    communication: CollectiveRows | None = None

    def __init__(self, table: SeriesTable, guard: Guard, settings: CollectSettings) -> None:
        self.rows: StepRows
        self.names: CellNames
        self._steps: OptimizerSteps | None
        rows = StepRows(table, settings.eps, refused_by(guard), histograms=settings.histograms)
        super().__init__(guard, settings, CellNames(), rows)
        self.capture = TensorCapture(self.names, guard)
        self._scaler: Any = None
        self._scale: float | None = None
        self._reader = ParameterReader(self.rows)
        self._updates = UpdateReader(self._reader)
        parts = {"forward": settings.forward, "backward": settings.backward, "inputs": settings.inputs}
        self._cells = CellCalls(self.rows, guard, self.flow, **parts)
        self._inputs = self._cells.inputs
        self.capture.batches = self._inputs.batches
        self._has_told_constants = False
        self._called_before = 0
        self._owned_by: dict[tuple[str, int], Owned] = {}

    # ------------------------------------------------------------------ watching

    def add(self, model: Any, optimizer: Any, grad_scaler: Any) -> None:
        """Check models and optimizers, and watch them.

        Raises:
            TypeError: for objects that are not cells, optimizers or loss scalers of MindSpore.
            ValueError: for a model without parameters, a model already watched, an optimizer of another model, or a
                pattern that matches nothing.

        """
        chunks = checked_models(model)
        optimizers = checked_optimizers(optimizer, chunks)
        check_scaler(grad_scaler)
        check_new(chunks, self.names)
        names = self.names.copy()
        names.add(chunks)
        self._selections = checked_targets(
            self.settings.targets, [m.name for m in names.modules], [p.name for p in names.parameters], "cell"
        )
        self.names.modules, self.names.parameters, self.names.chunks = names.modules, names.parameters, names.chunks
        self.optimizers += optimizers
        self.capture.names = self.names
        self._owned_by.clear()
        self._scaler = grad_scaler if grad_scaler is not None else self._scaler
        self._hook_all_steps()
        if ACTIVATIONS in self._selections:
            self._cells.choose(self.names.modules, self._selections[ACTIVATIONS].modules)

    def _hook_steps(self, listener: StepListener) -> OptimizerSteps:
        steps = self.capture.steps = OptimizerSteps(self.optimizers, listener)
        if self._scaler is not None:
            try:
                self._watch_scaler(self._scaler, steps)
            except BaseException:
                steps.close()
                raise
        return steps

    def _watch_scaler(self, scaler: Any, steps: OptimizerSteps) -> None:
        """Report the steps that the loss scaler skipped, before each watched pass and each update."""
        wait()
        known = ScalerWatch(scaler)

        def report_skipped() -> None:
            scale = known.last
            for _ in range(known.skipped()):
                for optimizer in list(self.optimizers):
                    self._scale = scale
                    steps.listener.scaler_entered(scaler, optimizer)
                    steps.listener.scaler_skipped(scaler, optimizer)
            self._scale = known.last

        def before_update() -> None:
            report_skipped()
            steps.listener.scaler_entered(scaler, self.optimizers[0])

        if rank_and_world_size()[1] == 1:  # several ranks must count alike, even where some see no pass
            self._cells.pass_begins = report_skipped
        steps.check_scaler = before_update

    def adopt(self, settings: CollectSettings) -> None:
        """Read what other settings choose, from the next step on; a pattern that matches nothing is left out."""
        self.settings = settings
        self._cells.forward, self._cells.backward = settings.forward, settings.backward
        modules, parameters = [m.name for m in self.names.modules], [p.name for p in self.names.parameters]
        self._selections = self._adopted_selections(modules, parameters)
        self._owned_by.clear()
        if ACTIVATIONS in self._selections:
            self._cells.choose(self.names.modules, self._selections[ACTIVATIONS].modules)

    def watch_communication(self) -> None:
        """Record collectives too; once."""
        if self.communication is not None:
            return
        self.communication = CollectiveRows(self.rows, self.guard, self.settings.call_sites)

    @property
    def on_host(self) -> bool:
        """Whether operations run on the CPU."""
        return on_host()

    @property
    def saturates(self) -> bool:
        """Whether the device stores the largest finite value where a result overflows."""
        return saturates()

    @property
    def takes_boundaries(self) -> bool:
        """Whether only the optimizers' calls mark the ends of steps: never, as they may be compiled."""
        return False

    @property
    def step_has_ended(self) -> bool:
        """Whether an optimizer's call has already ended the step that `TrainMonitor.step` marks; read once a step."""
        ended = self._steps is not None and self._steps.ended_step()
        if ended:
            self.guard.warn_once("step()", "monitor.step(): the optimizer's call has ended the step; leave it out")
        return ended

    @property
    def _intercepts_updates(self) -> bool:
        """Whether the last step's update was intercepted."""
        return self._steps is not None and self._steps.called > self._called_before

    def replay(self) -> None:
        """Do nothing: MindSpore's forward passes are not replayed."""

    def graph(self) -> dict[str, Any]:
        """Return the content of `graph.json`."""
        return describe(self.names, self.flow, self.communication.groups() if self.communication is not None else [])

    def stop_reading(self) -> None:
        """Stop reading tensors; the optimizers' steps are still reported."""
        self._cells.close()
        self._inputs.batches.clear()
        if self.communication is not None:
            self.communication.close()
        self.capture.close()
        self._updates.forget()

    # ------------------------------------------------------------------ one step

    def open_step(self, plan: Plan) -> None:
        """Watch the cells that the next step's plan needs."""
        intercepted = self._intercepts_updates
        self._begin_step(plan)
        self._cells.open_step(sampling=ACTIVATIONS in plan, inputs=self.in_window)
        if self.communication is not None:
            self.guard.run(COMMUNICATION, lambda: self._open_communication(sampling=COMMUNICATION in plan))
        if self._steps is not None:
            self._steps.reads = bool(plan)
            self._called_before = self._steps.called
        if UPDATES in plan and not intercepted:
            wait()
            self.guard.run(UPDATES, self._updates.keep, self._selected(UPDATES))

    def _open_communication(self, *, sampling: bool) -> None:
        assert self.communication is not None
        self.communication.open_step(sampling=sampling)

    def before_update(self, optimizer: Any, *, gradients_ready: bool = True) -> None:
        """Read gradients, parameters and optimizer state before an update; copy the weights that it will change."""
        del gradients_ready  # the update gets gradients as arguments
        micro_step = self._micro_step_of(optimizer)
        if GRADIENTS in self._plan and self._steps is not None:
            owned = self._owned(GRADIENTS, optimizer)
            self.guard.run(GRADIENTS, self._reader.gradients, owned, self._steps.gradients, optimizer, micro_step)
        if PARAMETERS in self._plan:
            weights = [named for _, named in self._owned(PARAMETERS, optimizer)]
            if not self._read:  # weights without an optimizer can break too; they are read with the first optimizer
                weights = [*self._unoptimized(PARAMETERS), *weights]
            self._read.update(id(named.parameter) for named in weights)
            self.guard.run(PARAMETERS, self._reader.parameters, weights, micro_step)
            self._tell_constants()
        if OPTIMIZER_STATE in self._plan:
            self._read_state_of.add(id(optimizer))
            self.guard.run(OPTIMIZER_STATE, self._read_state, optimizer, OPTIMIZER_STATE, micro_step)
            if self.settings.alignment and self._steps is not None:
                owned, given = self._owned(OPTIMIZER_STATE, optimizer), self._steps.gradients
                self.guard.run(OPTIMIZER_STATE, self._reader.directions, optimizer, owned, given, micro_step)
        if UPDATES in self._plan:
            self.guard.run(UPDATES, self._updates.keep, [named for _, named in self._owned(UPDATES, optimizer)])

    def after_update(self, optimizer: Any, *, gradients_ready: bool = False) -> None:
        """Read how an update changed the weights."""
        del gradients_ready
        self.after_part(optimizer)
        if PARAMETERS in self._plan and self.settings.after_update:
            weights = [named for _, named in self._owned(PARAMETERS, optimizer)]
            micro_step = self._optimizer_steps[id(optimizer)]
            self.guard.run(PARAMETERS, self._reader.parameters, weights, micro_step, PARAMETER_UPDATED)
        self._optimizer_steps[id(optimizer)] += 1

    def after_part(self, optimizer: Any) -> None:
        """Read how an update of some of an optimizer's parameters changed them."""
        if UPDATES in self._plan:
            self.guard.run(UPDATES, self._updates.read, self._optimizer_steps[id(optimizer)])

    def skipped(self, optimizer: Any) -> None:
        """Read a skipped step: everything that is read before an update, and no update."""
        self.before_update(optimizer)
        self._updates.forget()
        self._optimizer_steps[id(optimizer)] += 1

    def without_optimizer(self) -> None:
        """Read a step that ends without an intercepted optimizer call: weights, state and updates."""
        if self.on_host:
            wait()
        if self.optimizers:
            self._warn_compiled()
        if PARAMETERS in self._plan:
            self.guard.run(PARAMETERS, self._reader.parameters, self._selected(PARAMETERS))
            self._tell_constants()
        if OPTIMIZER_STATE in self._plan:
            for optimizer in self.optimizers:
                self._read_state_of.add(id(optimizer))
                self.guard.run(OPTIMIZER_STATE, self._read_state, optimizer, OPTIMIZER_STATE)
        if UPDATES in self._plan:
            self.guard.run(UPDATES, self._updates.read)

    def _warn_compiled(self) -> None:
        how = "GRAPH_MODE" if in_graph_mode() else "mindspore.jit"
        self.guard.warn_once(
            "compiled steps",
            f"the steps are compiled ({how}), so the optimizer's calls cannot be intercepted. Weights, optimizer state "
            "and updates are read at TrainMonitor.step(); gradients and activations are not.",
        )

    @property
    def data_parallel(self) -> bool:
        """Whether MindSpore is set up for data parallelism, where each rank has its own data."""
        return is_data_parallel()

    def end_step(self) -> None:
        """Complete the rows of the step.

        Raises:
            Exception: the error of a gradient hook, where the guard is strict.

        """
        error, self._cells.error = self._cells.error, None
        if error is not None:
            raise error
        super().end_step()

    def log(self, name: str, value: Any, micro_step: int) -> None:
        """Append a scalar."""
        if self._steps is not None:
            self._steps.reads = True
        super().log(name, value, micro_step)

    def note_loss_scale(self, scaler: Any) -> None:
        """Append the loss scaler's current scale as a scalar."""
        del scaler
        if self._scale is not None:
            self.log("loss_scale", self._scale, 0)

    # ------------------------------------------------------------------ pieces

    @property
    def _passes(self) -> ForwardPasses:
        return self._cells.counts

    def _learning_rate(self) -> float | None:
        return next((rate for rate in map(learning_rate_of, self.optimizers) if rate is not None), None)

    def _read_parameters(self, parameters: Sequence[NamedParameter]) -> None:
        self._reader.parameters(parameters)

    def _tell_constants(self) -> None:
        if not self._has_told_constants:
            self._has_told_constants = True
            self.guard.run(PARAMETERS, self._reader.constants, self._selected(PARAMETERS), self.names.modules)

    def _read_state(self, optimizer: Any, part: str, micro_step: int = 0) -> None:
        self._reader.state(optimizer, self._owned(part, optimizer), micro_step)

    def _selected(self, part: str) -> list[Any]:
        chosen = self._selections[part].parameters
        return [p for p in self.names.parameters if p.name in chosen]

    def _owned(self, part: str, optimizer: Any) -> Owned:
        """Return the optimizer's parameters that `part` selects ("" for all), each with its position."""
        key = (part, id(optimizer))
        if key not in self._owned_by:
            known = self.names.by_parameter()
            owned = [(i, known[id(p)]) for i, p in enumerate(parameters_of(optimizer)) if id(p) in known]
            chosen = self._selections[part].parameters if part else {p.name for _, p in owned}
            self._owned_by[key] = [(i, p) for i, p in owned if p.name in chosen]
        return self._owned_by[key]

    def _unoptimized(self, part: str) -> list[Any]:
        owned = {id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)}
        return [p for p in self._selected(part) if id(p.parameter) not in owned]
