"""Implements the parts of a `ModelWatch` that are the same for every framework."""

from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from trainsentry.collectors.backend import NoListener, OptimizerSteps, StepListener
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import Series
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
from trainsentry.collectors.shared.batch_rows import InputRows
from trainsentry.collectors.shared.forward_passes import ForwardPasses
from trainsentry.collectors.shared.host_rows import PendingRows
from trainsentry.collectors.shared.model_graph import DataFlow
from trainsentry.collectors.shared.scalar_rows import ModuleSettings, ScalarRows, TrainingModes
from trainsentry.collectors.targets import Selection, select


def refused_by(guard: Guard) -> Callable[[Exception], None]:
    """Return a callback for the error of an unreadable tensor; only that tensor's row is lost."""

    def refuse(error: Exception) -> None:
        if guard.strict:
            raise error
        guard.refuse("statistics of a tensor", error)

    return refuse


class WatchedModel:
    """The part of a `ModelWatch` that every framework shares.

    `names` has the `modules`, `parameters` and `chunks` of the watched model. `communication` is None where no
    collectives are watched. `_updates` reads how updates changed the weights; `moved` counts updated parameters.
    `_inputs` reads the model's inputs and keeps those of the last steps; None where nothing does.
    `in_window`: the step is one that is recorded, so that what is read at every step is read in it.
    """

    communication: Any = None
    _updates: Any = None
    _inputs: Any = None
    in_window: bool = True

    def __init__(self, guard: Guard, settings: CollectSettings, names: Any, rows: Any) -> None:
        self.guard = guard
        self.settings = settings
        self.names = names
        self.rows = rows
        self.optimizers: list[Any] = []
        self.own_group = ""
        self.flow = DataFlow()
        self._listener: StepListener = NoListener()
        self._steps: OptimizerSteps | None = None
        self._selections: dict[str, Selection] = {}
        self._scalars = ScalarRows(rows)
        self._modes = TrainingModes(names, rows)
        self._module_settings = ModuleSettings(names, rows)
        self._optimizer_steps: Counter[int] = Counter()
        self._read: set[int] = set()
        self._read_state_of: set[int] = set()
        self._plan: Plan = frozenset()

    # ------------------------------------------------------------------ implemented by each framework

    def _hook_steps(self, listener: StepListener) -> OptimizerSteps:
        """Return hooks that report the steps of all optimizers to a listener; a failure leaves no hook."""
        raise NotImplementedError

    def _read_parameters(self, parameters: Sequence[Any]) -> None:
        """Append a row for each parameter."""
        raise NotImplementedError

    def _read_state(self, optimizer: Any, part: str, micro_step: int = 0) -> None:
        """Append the rows of optimizer state for the parameters that `part` selects ("" for all)."""
        raise NotImplementedError

    def _learning_rate(self) -> float | None:
        """Return the optimizers' learning rate, None where it is not a plain number."""
        raise NotImplementedError

    @property
    def _passes(self) -> ForwardPasses:
        """The forward passes of this step."""
        raise NotImplementedError

    def stop_reading(self) -> None:
        """Remove every hook except those on the optimizers' steps."""
        raise NotImplementedError

    # ------------------------------------------------------------------ common to all frameworks

    def listen(self, listener: StepListener) -> None:
        """Report the optimizers' steps to a listener from now on, also those of models added later."""
        self._listener = listener
        if self._steps is not None:
            self._steps.listener = listener

    def _hook_all_steps(self) -> None:
        """Hook the optimizers, also those that were added last, in the place of earlier hooks."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        self._steps = self._hook_steps(self._listener)

    @property
    def expects_gradients(self) -> bool:
        """Whether this rank has parameters whose gradients the configuration selects."""
        return GRADIENTS in self._selections and bool(self._selections[GRADIENTS].parameters)

    @property
    def adopted_only(self) -> bool:
        """Whether optimizers are watched, and all were taken over at their first step, none given to `watch`."""
        return self._steps is not None and self._steps.adopted_only

    def close(self) -> None:
        """Remove every hook and patch."""
        if self._steps is not None:
            self._steps.close()
        self.stop_reading()

    def _adopted_selections(self, modules: Sequence[str], parameters: Sequence[str]) -> dict[str, Selection]:
        """Return each part's selection by the settings; report a pattern that matches nothing, and leave it out."""
        found: dict[str, Selection] = {}
        for part, patterns in self.settings.targets.items():
            found[part] = select(patterns, modules, parameters)
            if found[part].unmatched:
                missing = ", ".join(map(repr, found[part].unmatched))
                self.guard.warn_once(f"targets {missing}", f"collect.{part}.targets: {missing} match nothing")
        return found

    def take(self) -> PendingRows:
        """Remove and return the rows since the last call."""
        pending: PendingRows = self.rows.take()
        return pending

    def current_gradients(self) -> list[tuple[Series, Any]]:
        """Return the gradients that parameters hold now; empty where gradients are the optimizer's arguments."""
        return []

    def log(self, name: str, value: Any, micro_step: int) -> None:
        """Append a scalar."""
        self._scalars.log(name, value, micro_step)

    def examine(self) -> None:
        """Read now every parameter and all optimizer state not yet read in this step, and what was switched."""
        self._read_switches()
        unread = [p for p in self.names.parameters if id(p.parameter) not in self._read]
        self._read.update(id(p.parameter) for p in unread)
        self.guard.run(PARAMETERS, self._read_parameters, unread)
        for optimizer in self.optimizers:
            if id(optimizer) not in self._read_state_of:
                self._read_state_of.add(id(optimizer))
                self.guard.run(OPTIMIZER_STATE, self._read_state, optimizer, "")

    def read_gradients(self, optimizer: Any) -> None:
        """Read the gradients that a closure has computed since `before_update`; without closures there are none."""

    def end_step(self) -> None:
        """Complete the rows of the step."""
        self.flow.end()
        if UPDATES in self._plan:
            self.guard.run(UPDATES, self._note_updates)
        self._read_switches()
        self._scalars.end_step()
        if self.communication is not None:
            self.guard.run(COMMUNICATION, self.communication.end_step)

    def _read_switches(self) -> None:
        """Read the modes and settings of modules that have changed since they were last read."""
        if self.in_window:
            self.guard.run("training_mode", self._modes.read)
            self.guard.run("module_settings", self._module_settings.read)

    @property
    def modes_at_step_end(self) -> Sequence[bool]:
        """Which modules were in training mode when a step last ended."""
        return self._modes.known

    @property
    def varied_numbers(self) -> AbstractSet[str]:
        """The names of modules' numbers that have changed in this run."""
        return self._module_settings.varied

    @property
    def pass_forms(self) -> Any:
        """The forms of this step's training passes, and of the last step's, as the framework notes them."""
        return self._inputs.forms

    @property
    def seconds_waited(self) -> float | None:
        """Seconds that this step waited for collectives; None where that is unknown."""
        waited: float | None = self.communication.seconds_waited if self.communication is not None else None
        return waited

    @property
    def first_pass_at(self) -> float | None:
        """When the step's first pass began, by `time.perf_counter`; None where it was not seen."""
        at: float | None = self._inputs.first_pass_at if self._inputs is not None else None
        return at

    def last_inputs(self, steps_back: int) -> list[InputRows]:
        """Return what is known of the rows of the model's inputs so many steps ago; empty where nothing is."""
        found: list[InputRows] = self._inputs.batches.rows(steps_back) if self._inputs is not None else []
        return found

    def take_call_order(self) -> int | None:
        """Return a hash of this step's sequence of collectives, equal on every rank; None when unknown."""
        order: int | None = self.communication.take_order() if self.communication is not None else None
        return order

    def doing(self) -> dict[str, Any]:
        """Return the collective that this rank waits for, and the open ones; called from another thread."""
        if self.communication is None:
            return {"waits_for": None, "call": None, "open": []}
        found: dict[str, Any] = self.communication.doing()
        return found

    @property
    def micro_steps(self) -> int:
        """Micro-steps seen in this step; 0 where activations were not sampled."""
        return self._passes.micro_steps if ACTIVATIONS in self._plan else 0

    @property
    def left_out(self) -> int:
        """Passes and calls not recorded, because they exceed the limits of a record."""
        calls: int = self.communication.left_out if self.communication is not None else 0
        return self._passes.left_out + calls

    def _begin_step(self, plan: Plan) -> None:
        self._plan = plan
        self._optimizer_steps.clear()
        self._read.clear()
        self._read_state_of.clear()

    def _note_updates(self) -> None:
        """Append the number of parameters that the step updated, and the learning rate."""
        moved, self._updates.moved = self._updates.moved, 0
        self._scalars.updates(moved, self._learning_rate())

    def _micro_step_of(self, optimizer: Any) -> int:
        """Return how many steps an optimizer has already taken in this training step: the micro-step of its rows."""
        return self._optimizer_steps[id(optimizer)]
