"""Stands between the optimizers' hooks and the step loop, which is made after the hooks are."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainsentry.monitor.train_monitor import TrainMonitor
    from trainsentry.monitor.trainer.step_loop import StepLoop


class LateListener:
    """Passes what the collectors tell on to the step loop, as soon as there is one.

    `owner` is held so that the optimizer's hooks keep the monitor alive, and nothing else does.
    """

    target: "StepLoop | None" = None
    owner: "TrainMonitor | None" = None

    def before_optimizer(self, optimizer: Any, *, has_closure: bool) -> None:
        """An optimizer is about to update."""
        if self.target is not None:
            self.target.before_optimizer(optimizer, has_closure=has_closure)

    def after_optimizer(self, optimizer: Any) -> None:
        """An optimizer has updated."""
        if self.target is not None:
            self.target.after_optimizer(optimizer)

    def after_part(self, optimizer: Any) -> None:
        """An optimizer has updated a part of its parameters."""
        if self.target is not None:
            self.target.after_part(optimizer)

    def update_refused(self, optimizer: Any) -> None:
        """An optimizer has not updated, though it was to."""
        if self.target is not None:
            self.target.update_refused(optimizer)

    def scaler_entered(self, scaler: Any, optimizer: Any) -> None:
        """A loss scaler is about to step an optimizer, or to skip it."""
        if self.target is not None:
            self.target.scaler_entered(scaler, optimizer)

    def scaler_skipped(self, scaler: Any, optimizer: Any) -> None:
        """A loss scaler has decided not to call the optimizer."""
        if self.target is not None:
            self.target.scaler_skipped(scaler, optimizer)
