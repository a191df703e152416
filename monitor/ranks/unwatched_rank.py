"""A rank that is not watched: it counts steps, decides with the others, and stops with them."""

from typing import Any

from trainsentry.collectors.backend import OptimizerSteps
from trainsentry.collectors.guard import Guard
from trainsentry.monitor.errors import TrainingStopped
from trainsentry.monitor.ranks.consensus import Consensus, Proposal, kind_of
from trainsentry.monitor.schedule import Schedule
from trainsentry.monitor.step_end import StepEnd


class UnwatchedRank:
    """Counts the optimizers' steps and reads no tensor. `steps` are the framework's hooks."""

    def __init__(self, consensus: Consensus, schedule: Schedule, guard: Guard, start_step: int) -> None:
        self.consensus = consensus
        self.schedule = schedule
        self.guard = guard
        self.step = start_step
        self.stop: TrainingStopped | None = None
        self.steps: list[OptimizerSteps] = []
        self.ends_at_callback = False
        self._updated = False
        self._ended = 0
        self._end = StepEnd(())

    def follow(self, steps: OptimizerSteps) -> None:
        """Count the steps of further optimizers too."""
        self.steps.append(steps)
        self._end = StepEnd(id(optimizer) for optimizer in self.optimizers)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers whose steps are counted."""
        return [optimizer for steps in self.steps for optimizer in steps.optimizers]

    def before_optimizer(self, optimizer: Any, *, has_closure: bool) -> None:
        """Do nothing: no tensor is read here."""

    def after_part(self, optimizer: Any) -> None:
        """Do nothing."""

    def after_optimizer(self, optimizer: Any) -> None:
        """End the step after the last optimizer, unless a trainer's callback ends the steps."""
        self._updated = True
        if not self.ends_at_callback and self._end.stepped(id(optimizer)):
            self.boundary()

    def update_refused(self, optimizer: Any) -> None:
        """End the step as after an update."""
        self.after_optimizer(optimizer)

    def scaler_entered(self, scaler: Any, optimizer: Any) -> None:
        """Do nothing."""

    def scaler_skipped(self, scaler: Any, optimizer: Any) -> None:
        """End the step as after an update."""
        self.after_optimizer(optimizer)

    def trained_without_step(self, passes: int) -> None:
        """Do nothing: the watched ranks say so."""

    def boundary(self) -> None:
        """End a step.

        Raises:
            TrainingStopped: when the ranks have agreed to stop.

        """
        step, self.step = self.step, self.step + 1
        self._updated = False
        self._ended += 1
        agreed = self.consensus.at_boundary(step, Proposal(stop=kind_of(self.stop)))
        self.consensus.commands(agreed, [])
        stop = self.consensus.stop_after(step, agreed, self.stop)
        if stop is not None:
            self.stop = None
            raise stop

    def step_marked(self) -> None:
        """End a step that the program marks, unless the optimizers' calls end the steps."""
        if any(steps.adopted_only for steps in self.steps):
            first, self.ends_at_callback = not self.ends_at_callback, True
            if not (first and self._ended and not self._updated):
                self.boundary()
            return
        seen = [steps.ended_step() for steps in self.steps]  # a list, so that each is asked once per step
        if not any(seen):
            self.boundary()

    def doing(self) -> dict[str, Any]:
        """Return this rank's activity, as far as it is known."""
        return {"step": self.step, "waits_for": None, "call": None, "open": []}

    def go_to(self, step: int) -> None:
        """Continue from another step."""
        self.step = step
        self.schedule.dense = range(0)

    def close(self) -> None:
        """Remove the hooks."""
        for steps in self.steps:
            steps.close()
