"""A rank that is not watched: it counts steps, decides with the others, and stops with them."""

from typing import Any

from trainsentry.collectors.backend import OptimizerSteps
from trainsentry.collectors.guard import Guard
from trainsentry.monitor.errors import TrainingStopped
from trainsentry.monitor.ranks.consensus import Consensus, Proposal, kind_of
from trainsentry.monitor.schedule import Schedule
from trainsentry.monitor.step_end import StepEnd


class UnwatchedRank:
    """Listens to the optimizers' steps and reads nothing. `steps` are the framework's, and remove the hooks."""

    def __init__(self, common: Consensus, schedule: Schedule, guard: Guard, start_step: int) -> None:
        self.common = common
        self.schedule = schedule
        self.guard = guard
        self.step = start_step
        self.stop: TrainingStopped | None = None
        self.steps: list[OptimizerSteps] = []
        self.ends_elsewhere = False
        self._end = StepEnd(())

    def follow(self, steps: OptimizerSteps) -> None:
        """Take steps to listen to, beside those that are listened to already."""
        self.steps.append(steps)
        self._end = StepEnd(id(optimizer) for optimizer in self.optimizers)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers whose steps are counted."""
        return [optimizer for steps in self.steps for optimizer in steps.optimizers]

    def before_optimizer(self, optimizer: Any, *, has_closure: bool) -> None:
        """Do nothing: what an optimizer takes is not read here."""

    def after_part(self, optimizer: Any) -> None:
        """Do nothing."""

    def after_optimizer(self, optimizer: Any) -> None:
        """End the step with the last optimizer, unless a trainer's callback tells where steps end."""
        if not self.ends_elsewhere and self._end.stepped(id(optimizer)):
            self.boundary()

    def update_refused(self, optimizer: Any) -> None:
        """End the step."""
        self.after_optimizer(optimizer)

    def scaler_entered(self, scaler: Any, optimizer: Any) -> None:
        """Do nothing."""

    def scaler_skipped(self, scaler: Any, optimizer: Any) -> None:
        """End the step, as where the optimizer was called."""
        self.after_optimizer(optimizer)

    def boundary(self) -> None:
        """End a step.

        Raises:
            TrainingStopped: when the ranks have agreed to stop.

        """
        step, self.step = self.step, self.step + 1
        agreed = self.common.at_boundary(step, Proposal(stop=kind_of(self.stop)))
        stop = self.common.stop_after(step, agreed, self.stop)
        if stop is not None:
            self.stop = None
            raise stop

    def step_marked(self) -> None:
        """Take the program's own mark of a step's end, where no optimizer's call has told of it."""
        told = [steps.ended_step() for steps in self.steps]  # each is asked
        if not any(told):
            self.boundary()

    def doing(self) -> dict[str, Any]:
        """Return what this rank is doing, as far as it is known."""
        return {"step": self.step, "waits_for": None, "call": None, "open": []}

    def go_to(self, step: int) -> None:
        """Go on from another step."""
        self.step = step
        self.schedule.dense = range(0)

    def close(self) -> None:
        """Remove the hooks."""
        for steps in self.steps:
            steps.close()
