"""Watches a MindSpore model: reads its tensors at each step, as the step's plan says."""

from collections import Counter
from typing import Any

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.hooks.activations import CellCalls
from trainsentry.collectors.mindspore.hooks.communication import CollectiveRows
from trainsentry.collectors.mindspore.hooks.optimizer_steps import (
    OptimizerSteps,
    ScalerWatch,
    StepListener,
    check_scaler,
)
from trainsentry.collectors.mindspore.rows.cell_names import CellNames
from trainsentry.collectors.mindspore.rows.parameters import (
    Owned,
    ParameterReader,
    UpdateReader,
    learning_rate_of,
    parameters_of,
)
from trainsentry.collectors.mindspore.rows.step_rows import StepRows
from trainsentry.collectors.mindspore.runtime import in_graph_mode, is_data_parallel, on_host, rank_and_world_size, wait
from trainsentry.collectors.mindspore.tensor_capture import TensorCapture
from trainsentry.collectors.mindspore.validation import check_new, checked_models, checked_optimizers
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


class MindSporeWatch:
    """Reads a MindSpore model around the steps of its optimizers, as `TorchWatch` does for torch.

    In compiled steps no call is intercepted: `TrainMonitor.step` is the step boundary, weights and state are read from
    the parameters, and an update is the difference from the weights at the end of the previous step.
    """

    def __init__(self, table: SeriesTable, guard: Guard, settings: CollectSettings) -> None:
        self.guard = guard
        self.settings = settings
        self.names = CellNames()
        self.optimizers: list[Any] = []
        self.own_group = ""
        self.communication: CollectiveRows | None = None
        self.flow = DataFlow()
        self.rows = StepRows(table, settings.eps, self._refused)
        self.capture = TensorCapture(self.names, guard)
        self._selections: dict[str, Selection] = {}
        self._steps: OptimizerSteps | None = None
        self._scaler: ScalerWatch | None = None
        self._scale: float | None = None
        self._reader = ParameterReader(self.rows)
        self._updates = UpdateReader(self._reader)
        self._cells = CellCalls(self.rows, guard, self.flow, forward=settings.forward, backward=settings.backward)
        self._modes = TrainingModes(self.names, self.rows)
        self._optimizer_steps: Counter[int] = Counter()
        self._scalars = ScalarRows(self.rows)
        self._read: set[int] = set()
        self._read_state_of: set[int] = set()
        self._plan: Plan = frozenset()
        self._called_before = 0
        self._owned_by: dict[tuple[str, int], Owned] = {}

    # ------------------------------------------------------------------ watching

    def add(self, model: Any, optimizer: Any, grad_scaler: Any, listener: StepListener) -> None:
        """Check and add models and optimizers, and report the optimizers' steps to `listener`.

        Raises:
            TypeError: for objects that are not cells, optimizers or loss scalers of MindSpore.
            ValueError: for a model without parameters, one that is watched already, an optimizer of another
                model, or a pattern that matches nothing.

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
        if self._steps is not None:
            self._steps.close()
        self._steps = OptimizerSteps(self.optimizers, listener)
        self.capture.steps = self._steps
        if grad_scaler is not None:
            self._watch_scaler(grad_scaler, listener)
        if ACTIVATIONS in self._selections:
            self._cells.choose(self.names.modules, self._selections[ACTIVATIONS].modules)

    def _watch_scaler(self, scaler: Any, listener: StepListener) -> None:
        """Check the loss scaler for skipped steps, before each intercepted pass and each update."""
        wait()
        known = self._scaler = ScalerWatch(scaler)

        def report_skipped() -> None:
            scale = known.last
            for _ in range(known.skipped()):
                for optimizer in list(self.optimizers):
                    self._scale = scale
                    listener.scaler_entered(scaler, optimizer)
                    listener.scaler_skipped(scaler, optimizer)
            self._scale = known.last

        def before_update() -> None:
            report_skipped()
            listener.scaler_entered(scaler, self.optimizers[0])

        if rank_and_world_size()[1] == 1:  # several ranks must count alike, also those without an intercepted pass
            self._cells.pass_begins = report_skipped
        if self._steps is not None:
            self._steps.check_scaler = before_update

    def watch_communication(self) -> None:
        """Record collectives too."""
        self.communication = CollectiveRows(self.rows, self.guard, self.settings.call_sites)

    @property
    def on_host(self) -> bool:
        """Whether operations run on the CPU."""
        return on_host()

    @property
    def takes_boundaries(self) -> bool:
        """Whether only the optimizers' calls mark the ends of steps: never, as they may be compiled."""
        return False

    @property
    def step_has_ended(self) -> bool:
        """Whether an optimizer's call has already ended the step that `TrainMonitor.step` marks; read once a step."""
        ended = self._steps is not None and self._steps.have_told()
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

    def close(self) -> None:
        """Stop watching; restore every cell and optimizer."""
        if self._steps is not None:
            self._steps.close()
        self.stop_reading()

    def stop_reading(self) -> None:
        """Stop reading tensors; the optimizers' steps are still reported."""
        self._cells.close()
        if self.communication is not None:
            self.communication.close()
        self.capture.close()
        self._updates.forget()

    # ------------------------------------------------------------------ one step

    def open_step(self, plan: Plan) -> None:
        """Prepare the next step: watch the cells that its plan needs."""
        self._plan = plan
        intercepted = self._intercepts_updates
        self._optimizer_steps.clear()
        self._read.clear()
        self._read_state_of.clear()
        self._cells.open_step(sampling=ACTIVATIONS in plan)
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
        """Read gradients, parameters and state before an update, and copy the weights that it changes."""
        del gradients_ready  # gradients are arguments of the update
        turn = self._optimizer_steps[id(optimizer)]
        if GRADIENTS in self._plan and self._steps is not None:
            owned = self._owned(GRADIENTS, optimizer)
            self.guard.run(GRADIENTS, self._reader.gradients, owned, self._steps.gradients, optimizer, turn)
        if PARAMETERS in self._plan:
            weights = [named for _, named in self._owned(PARAMETERS, optimizer)]
            if not self._read:  # weights without an optimizer can break too; they are read with the first optimizer
                weights = [*self._without_owner(PARAMETERS), *weights]
            self._read.update(id(named.parameter) for named in weights)
            self.guard.run(PARAMETERS, self._reader.parameters, weights, turn)
        if OPTIMIZER_STATE in self._plan:
            self._read_state_of.add(id(optimizer))
            owned = self._owned(OPTIMIZER_STATE, optimizer)
            self.guard.run(OPTIMIZER_STATE, self._reader.state, optimizer, owned, turn)
        if UPDATES in self._plan:
            self.guard.run(UPDATES, self._updates.keep, [named for _, named in self._owned(UPDATES, optimizer)])

    def after_update(self, optimizer: Any, *, gradients_ready: bool = False) -> None:
        """Read how an update changed the weights."""
        del gradients_ready
        self.after_part(optimizer)
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
        if OPTIMIZER_STATE in self._plan:
            for optimizer in self.optimizers:
                self._read_state_of.add(id(optimizer))
                owned = self._owned(OPTIMIZER_STATE, optimizer)
                self.guard.run(OPTIMIZER_STATE, self._reader.state, optimizer, owned)
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

    def take_call_order(self) -> int | None:
        """Return None (unknown): collectives are intercepted only at sampled steps."""
        return None

    @property
    def seconds_waited(self) -> float | None:
        """None (unknown): collectives run asynchronously."""
        return None

    def doing(self) -> dict[str, Any]:
        """Return the collective that this rank waits for: none is known."""
        return {"waits_for": None, "call": None, "open": []}

    def end_step(self) -> None:
        """Complete the rows of the step.

        Raises:
            Exception: the error of a gradient hook, where the guard is strict.

        """
        error, self._cells.error = self._cells.error, None
        if error is not None:
            raise error
        if UPDATES in self._plan:
            self.guard.run(UPDATES, self._note_updates)
        if ACTIVATIONS in self._plan or PARAMETERS in self._plan:
            self.guard.run("training_mode", self._modes.read)
        self._scalars.end_step()
        if self.communication is not None:
            self.guard.run(COMMUNICATION, self.communication.end_step)

    def examine(self) -> None:
        """Read every parameter and all optimizer state not yet read in this step, whatever the plan."""
        unread = [p for p in self.names.parameters if id(p.parameter) not in self._read]
        self._read.update(id(p.parameter) for p in unread)
        self.guard.run(PARAMETERS, self._reader.parameters, unread)
        for optimizer in self.optimizers:
            if id(optimizer) not in self._read_state_of:
                self._read_state_of.add(id(optimizer))
                self.guard.run(OPTIMIZER_STATE, self._reader.state, optimizer, self._owned("", optimizer))

    def log(self, name: str, value: Any, micro_step: int) -> None:
        """Append a scalar."""
        if self._steps is not None:
            self._steps.reads = True
        self._scalars.log(name, value, micro_step)

    def note_loss_scale(self, scaler: Any) -> None:
        """Append the loss scaler's current scale as a scalar."""
        del scaler
        if self._scale is not None:
            self.log("loss_scale", self._scale, 0)

    @property
    def micro_steps(self) -> int:
        """Micro-steps counted in this step; 0 when activations were not sampled."""
        return self._cells.counts.micro_steps if ACTIVATIONS in self._plan else 0

    @property
    def left_out(self) -> int:
        """Passes and calls left out because a record has no room for them."""
        return self._cells.counts.left_out + (self.communication.left_out if self.communication is not None else 0)

    def take(self) -> PendingRows:
        """Return the rows of the step, or of its part since the last call."""
        return self.rows.take()

    # ------------------------------------------------------------------ pieces

    def _note_updates(self) -> None:
        moved, self._updates.moved = self._updates.moved, 0
        rate = next((r for r in map(learning_rate_of, self.optimizers) if r is not None), None)
        self._scalars.updates(moved, rate)

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

    def _without_owner(self, part: str) -> list[Any]:
        owned = {id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)}
        return [p for p in self._selected(part) if id(p.parameter) not in owned]

    def _refused(self, error: Exception) -> None:
        """Report that a tensor could not be read: it has no row, and no other row is affected."""
        if self.guard.strict:
            raise error
        self.guard.refuse("statistics of a tensor", error)
