"""Callbacks for `mindspore.train.Model.train`."""

from typing import Any

from mindspore import Tensor
from mindspore.train.callback import Callback

from trainsentry.monitor.debugger.precision_debugger import PrecisionDebugger
from trainsentry.monitor.errors import TrainingStopped
from trainsentry.monitor.train_monitor import TrainMonitor


class MsprobeStep(Callback):  # type: ignore[misc] # MindSpore has no types
    """Starts and ends the step of a `PrecisionDebugger` at each step of `Model.train`, as msprobe's callback does."""

    def __init__(self, debugger: PrecisionDebugger) -> None:
        super().__init__()
        self.debugger = debugger

    def on_train_step_begin(self, run_context: Any) -> None:
        """Start dumping."""
        self.debugger.start(run_context.original_args().network)

    def on_train_step_end(self, run_context: Any) -> None:
        """Stop dumping, and end the debugger's step."""
        del run_context
        self.debugger.stop()
        self.debugger.step()


class MsprobeInitStep(Callback):  # type: ignore[misc] # MindSpore has no types
    """Makes the debugger count from the step at which `Model.train` resumes (its `initial_epoch`)."""

    def on_train_begin(self, run_context: Any) -> None:
        """Set the number of the first step."""
        first = int(getattr(run_context.original_args(), "initial_step", 0) or 0)
        if first:
            PrecisionDebugger.set_init_step(first)


class MonitorStep(Callback):  # type: ignore[misc] # MindSpore has no types
    """Logs the loss and ends the monitor's step, which in compiled modes nothing else does.

    Use it without `dataset_sink_mode`, which calls the callback once for many steps. A stop ends the training at the
    same step and is raised once the training has ended.

    >>> model.train(1, data, callbacks=[MonitorStep(monitor)])  # doctest: +SKIP
    """

    def __init__(self, monitor: TrainMonitor) -> None:
        super().__init__()
        self.monitor = monitor
        self._stop: TrainingStopped | None = None

    def on_train_begin(self, run_context: Any) -> None:
        """Make steps end at this callback."""
        del run_context
        self.monitor.ends_at_callback(True)

    def on_train_step_end(self, run_context: Any) -> None:
        """Log the loss of the step, and end the step."""
        outputs = run_context.original_args().net_outputs
        loss = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        if isinstance(loss, Tensor) and loss.size == 1:
            self.monitor.log(loss=loss)
        try:
            self.monitor.step_ended()
        except TrainingStopped as stop:
            self._stop = stop
            run_context.request_stop()

    def on_train_end(self, run_context: Any) -> None:
        """Raise the stop that ended the training.

        Raises:
            TrainingStopped: when a stop was requested.

        """
        del run_context
        self.monitor.ends_at_callback(False)
        stop, self._stop = self._stop, None
        if stop is not None:
            raise stop
