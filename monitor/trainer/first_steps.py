"""Says once what keeps a run from being recorded: no step boundary, or steps without a gradient."""

from typing import TYPE_CHECKING, Final

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import GRADIENT
from trainsentry.collectors.settings import GRADIENTS
from trainsentry.monitor.step_end import PATIENCE as STEPS_OF_ONE

if TYPE_CHECKING:
    from trainsentry.monitor.trainer.step_loop import StepLoop

NO_STEP: Final = "no step"
NO_GRADIENT: Final = "no gradient"
"""Names of the two troubles in `status.json`."""

PATIENCE: Final = 20
"""Steps without a gradient before it is said."""

MISSING_CALL: Final = (
    "call watch(model, optimizer) with the model and the optimizer that train, or monitor.step() after each step"
)


class FirstSteps:
    """Looks at the first records of a run, until a gradient was seen."""

    def __init__(self, loop: "StepLoop") -> None:
        self.loop = loop
        self._without_gradient = 0
        self._done = False

    def trained_without_step(self, passes: int) -> None:
        """Say that `passes` backward passes have brought no step."""
        loop = self.loop
        if passes <= 2 * (loop.grad_acc_steps or 0):
            return
        kinds = ", ".join(type(optimizer).__name__ for optimizer in loop.watch.optimizers)
        waiting = [type(o).__name__ for o in loop.watch.optimizers if not loop.step_end.has_stepped(id(o))]
        if 0 < len(waiting) < len(loop.watch.optimizers):
            text = (
                f"no step was recorded in {passes} backward passes: of the optimizers given to watch(), "
                f"{', '.join(waiting)} {'have' if len(waiting) > 1 else 'has'} not stepped yet. A step ends when all "
                f"have, or after {STEPS_OF_ONE} of another one. Add one that joins later by another watch(model, "
                "optimizer), or call monitor.step() after each step."
            )
        elif kinds:
            text = (
                f"no step was recorded in {passes} backward passes: the optimizer given to watch() ({kinds}) has not "
                f"stepped; {MISSING_CALL}. A loop that accumulates more micro-steps says so with "
                "watch(…, grad_acc_steps=…)."
            )
        else:
            text = (
                f"no step was recorded in {passes} backward passes: watch() got no optimizer, and none has stepped the "
                f"watched model; {MISSING_CALL}."
            )
        loop.guard.warn_once(NO_STEP, text)
        loop.counters.send()  # there is no boundary to send them at

    def look_at(self, record: StepRecord) -> None:
        """Look for a gradient in a record."""
        if self._done or record.skipped or GRADIENTS not in self.loop.schedule.plan(record.step):
            return
        table = self.loop.table
        if any(table.series[series_id].quantity == GRADIENT for series_id in record.ids.tolist()):
            self._done = True
            return
        self._without_gradient += 1
        if self._without_gradient < PATIENCE:
            return
        self._done = True
        if self.loop.watch.expects_gradients:
            self.loop.guard.warn_once(
                NO_GRADIENT,
                f"no gradient was seen in {PATIENCE} steps: the watched parameters have none when the step ends. Give "
                "watch() the model that trains and the optimizer that takes its gradients (of a wrapper: the wrapper), "
                "and call monitor.step() before zero_grad().",
            )
