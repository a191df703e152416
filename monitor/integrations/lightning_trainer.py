"""A callback for the Trainer of Lightning."""

from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import Tensor

from trainsentry.monitor.integrations.callback_monitor import CallbackMonitor, ConfigSource


class LightningCallback(Callback):  # type: ignore[misc] # read without its types
    """Watches `Trainer.fit()`: steps, loss, checkpoints, incidents and stops, with automatic or manual optimization.

    >>> Trainer(callbacks=[LightningCallback({"on_incident": {"stop": True}})])  # doctest: +SKIP

    A step is a batch after which an optimizer has stepped. Checkpoints hold the detectors' state. A stop sets
    `trainer.should_stop` at the end of its step; `stopped` then says why. `monitor` is the `TrainMonitor` while it
    trains, and `incidents` is what it has found, after the training too. The logger gets the number of incidents as
    `trainsentry_incidents`.

    Raises:
        ConfigError: for an unknown key or a value that is not allowed.

    """

    def __init__(self, config: ConfigSource = None) -> None:
        self._callback = CallbackMonitor(config)
        self._saved: dict[str, Any] | None = None
        self._steps = 0
        self._incidents = 0

    @property
    def monitor(self) -> Any:
        """The `TrainMonitor` while the Trainer trains, else None."""
        return self._callback.monitor

    @property
    def incidents(self) -> Any:
        """The `Incident`s of this training so far, worst first; after the training too."""
        return self._callback.incidents

    @property
    def stopped(self) -> Any:
        """The `TrainingStopped` that ended the training, else None."""
        return self._callback.stopped

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the model as the strategy has wrapped it, and its optimizers."""
        model = trainer.strategy.model if trainer.strategy.model is not None else pl_module
        saved, self._saved = self._saved, None
        self._steps, self._incidents = int(trainer.global_step), 0
        first = int(saved["step"]) if saved is not None else self._steps
        self._callback.begin(model, list(trainer.optimizers), start_step=first, state=saved)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Close the monitor ahead of the last pass of stochastic weight averaging: batch norms look, nothing learns."""
        if getattr(trainer.fit_loop, "_skip_backward", False):
            self._callback.end()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Judge the gradients before the update: Lightning computes them inside the optimizer's step."""
        if self._callback.monitor is not None:
            self._callback.monitor.gradients_arrived(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the loss; end the step if an optimizer has stepped since the last one."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._callback.log(loss=loss.detach())
        if int(trainer.global_step) == self._steps:  # it accumulates
            return
        self._steps = int(trainer.global_step)
        if self._callback.end_step() is not None:
            trainer.should_stop = True
        new = len(self._callback.take_incidents())
        if new:
            self._incidents += new
            pl_module.log("trainsentry_incidents", float(self._incidents), on_step=True, rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the monitor."""
        self._callback.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the monitor."""
        self._callback.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the detectors' state for the Trainer's checkpoint."""
        return self._callback.state_dict() or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until the training starts."""
        self._saved = dict(state_dict) or None
