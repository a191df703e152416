"""Reads what an optimizer's step begins with: its options, the weights and the state."""

import weakref
from collections.abc import Sequence
from itertools import chain

from torch.optim import Optimizer

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import LOST_STATE, PARAMETER_UPDATED, Series
from trainsentry.collectors.settings import OPTIMIZER_STATE, PARAMETERS, CollectSettings, Plan
from trainsentry.collectors.torch.parameters.buffer_writes import BufferWrites
from trainsentry.collectors.torch.parameters.buffers import BufferReader
from trainsentry.collectors.torch.parameters.directions import read_directions
from trainsentry.collectors.torch.parameters.gradient_writes import GradientWrites
from trainsentry.collectors.torch.parameters.gradients import OptimizedParameters
from trainsentry.collectors.torch.parameters.idle_optimizers import IdleOptimizers
from trainsentry.collectors.torch.parameters.options import OptionReader
from trainsentry.collectors.torch.parameters.readers import StateCount, read_parameters, read_state
from trainsentry.collectors.torch.parameters.stopped_writes import StoppedTensors
from trainsentry.collectors.torch.parameters.unheld import UnheldParameters
from trainsentry.collectors.torch.parameters.weight_writes import WeightWrites
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter


class ModelState:
    """Appends the rows of a model's weights and of its optimizers' state and options.

    `settings` may be replaced between steps. Each part runs under the guard: a failure costs that part alone.
    """

    def __init__(self, rows: StepRows, guard: Guard, settings: CollectSettings, optimized: OptimizedParameters) -> None:
        self.rows = rows
        self.guard = guard
        self.settings = settings
        self.optimized = optimized
        self._options = OptionReader(rows)
        self._gradient_writes = GradientWrites(rows, optimized.names)
        self._buffers, self._buffer_writes = BufferReader(rows, optimized.names), BufferWrites(rows, optimized.names)
        self._stopped_tensors = StoppedTensors(rows, optimized.names)
        self._steps = 0
        self._counts_for: weakref.ref[Optimizer] | None = None
        self._state_count = StateCount()
        self._has_told_constants = False
        self._unheld = UnheldParameters(rows, optimized.names, guard.warn_once)
        self._idle = IdleOptimizers(rows, optimized)
        self._weight_writes = WeightWrites(
            rows, lambda: chain(*(chunk.parameters() for chunk in optimized.names.chunks)), self._unheld.note_left
        )

    def close(self) -> None:
        """Take away what is hooked."""
        self._gradient_writes.close()

    def open_step(self) -> None:
        """Begin a step."""
        self._steps += 1

    def gradient_writes(self, *, every: bool) -> str:
        """Return how often gradients were written before the newest update, or `every` count of the run, as a text."""
        return self._gradient_writes.every_count() if every else self._gradient_writes.newest_count()

    def read_options(self, optimizer: Optimizer) -> None:
        """Read the numbers of an optimizer's groups that have changed; at every step, as they cost little."""
        self.guard.run("options", self._options.read, optimizer)

    def count_writes(self, optimizer: Optimizer, micro_steps: int, *, is_replayed: bool) -> None:
        """Count how often the gradients of an optimizer were written; `micro_steps` is 0 where it is unknown.

        Where a graph `is_replayed`, its writes are not counted. Buffers are counted with the first optimizer.
        """
        if is_replayed:
            return
        self.guard.run("gradient_writes", self._gradient_writes.read, optimizer, micro_steps)
        if self._counts_for is None or self._counts_for() is None:
            self._counts_for = weakref.ref(optimizer)
        if self._counts_for() is optimizer:
            self.guard.run("buffer_writes", self._buffer_writes.read)
            self.guard.run("buffer_writes", self._stopped_tensors.read, self._steps)

    def has_lost_state(self, optimizer: Optimizer) -> bool:
        """Whether state was lost since the optimizer's last update; append a row if so."""
        if not self.guard.run(OPTIMIZER_STATE, self._state_count.has_fewer, optimizer):
            return False
        self.rows.add_scalar(self.rows.table.series_id(Series(LOST_STATE, LOST_STATE, scalar=True)), 1.0)
        return True

    def read_weights(
        self, plan: Plan, optimizer: Optimizer, micro_step: int, read: set[int], optimizers: Sequence[Optimizer]
    ) -> None:
        """Read the weights that an optimizer is about to change, and note in `read` which were read.

        Weights without an optimizer can break too: they are read with the first optimizer, and so are buffers.
        """
        if PARAMETERS not in plan:
            return
        owned = self.optimized.owned(PARAMETERS, optimizer)
        if not read:
            owned = [*self.optimized.unoptimized(PARAMETERS, optimizers), *owned]
            self._read_buffers()
        self._tell_constants()
        read.update(id(p.parameter) for p in owned)
        self.guard.run(PARAMETERS, read_parameters, self.rows, owned, micro_step)

    def _tell_constants(self) -> None:
        if not self._has_told_constants:
            self._has_told_constants = True
            told = self.optimized.selected(PARAMETERS), self.optimized.names.modules
            self.guard.run("weight_writes", self._weight_writes.tell_constants, *told)

    def _read_buffers(self) -> None:
        if self.settings.buffers:
            self.guard.run("buffers", self._buffers.read, self.optimized.selection(PARAMETERS).modules)

    def read_state(self, plan: Plan, optimizer: Optimizer, micro_step: int, read: set[int]) -> None:
        """Read an optimizer's state before its update, and note in `read` that it was read."""
        if OPTIMIZER_STATE not in plan:
            return
        read.add(id(optimizer))
        owned = self.optimized.owned(OPTIMIZER_STATE, optimizer)
        self.guard.run(OPTIMIZER_STATE, read_state, self.rows, optimizer, owned, micro_step)
        if self.settings.alignment:
            self.guard.run(OPTIMIZER_STATE, read_directions, self.rows, optimizer, owned, micro_step)

    def look_for_unheld(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> None:
        """Look, at an update, for parameters with a gradient that none of all optimizers holds, or that one leaves."""
        self.guard.run("weight_writes", self._unheld.note, optimizer, optimizers)
        if len(optimizers) > 1:
            self.guard.run("weight_writes", self._idle.note, optimizer, optimizers, self._steps)

    def begin_writes(self, optimizer: Optimizer, owned: list[NamedParameter]) -> None:
        """Note the counts of writes of an optimizer's weights before its update."""
        self.guard.run("weight_writes", self._weight_writes.begin, optimizer, owned)

    def updated(self, plan: Plan, optimizer: Optimizer, micro_step: int) -> None:
        """Note an update, and which weights it left unwritten; read the new ones where the settings ask for them."""
        self.guard.run("weight_writes", self._weight_writes.updated, optimizer)
        self.guard.run("options", self._options.updated, optimizer)
        if PARAMETERS in plan and self.settings.after_update:
            owned = self.optimized.owned(PARAMETERS, optimizer)
            self.guard.run(PARAMETERS, read_parameters, self.rows, owned, micro_step, PARAMETER_UPDATED)
        self.guard.run(OPTIMIZER_STATE, self._state_count.updated, optimizer)

    def read_without_optimizer(
        self, plan: Plan, parameters: Sequence[NamedParameter], optimizers: Sequence[Optimizer]
    ) -> None:
        """Read weights and state at the end of a step that no optimizer's call ends."""
        if PARAMETERS in plan:
            self.guard.run(PARAMETERS, read_parameters, self.rows, parameters)
            self._tell_constants()
            self._read_buffers()
        for optimizer in optimizers:
            self.read_options(optimizer)
            self.read_state(plan, optimizer, 0, set())
