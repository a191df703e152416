"""Callbacks for `mindspore.train.Model.train`."""

from typing import Any

from mindspore import Tensor
from mindspore.train.callback import Callback

from trainsentry.monitor.debugger.precision_debugger import PrecisionDebugger
from trainsentry.monitor.errors import TrainingStopped
from trainsentry.monitor.train_monitor import TrainMonitor


class MsprobeStep(Callback):  # type: ignore[misc] # MindSpore has no types
    """Starts a `PrecisionDebugger` at each step of `Model.train`, and ends its step, as msprobe's callback does."""

    def __init__(self, debugger: PrecisionDebugger) -> None:
        super().__init__()
        self.debugger = debugger

    def on_train_step_begin(self, run_context: Any) -> None:
        """Begin to dump."""
        self.debugger.start(run_context.original_args().network)

    def on_train_step_end(self, run_context: Any) -> None:
        """Dump no more, and go on to the next step."""
        del run_context
        self.debugger.stop()
        self.debugger.step()


class MsprobeInitStep(Callback):  # type: ignore[misc] # MindSpore has no types
    """Has a debugger count from the step that `Model.train` goes on from (its `initial_epoch`)."""

    def on_train_begin(self, run_context: Any) -> None:
        """Take the first step's number."""
        first = int(getattr(run_context.original_args(), "initial_step", 0) or 0)
        if first:
            PrecisionDebugger.set_init_step(first)


class MonitorStep(Callback):  # type: ignore[misc] # MindSpore has no types
    """Logs the loss, and tells the monitor when a step is over: in compiled modes nobody else does.

    It works without `dataset_sink_mode`: with it the callback is called once for many steps. A stop that the monitor
    asks for ends the training at the same step, and is raised when it has ended.

    >>> model.train(1, data, callbacks=[MonitorStep(monitor)])  # doctest: +SKIP
    """

    def __init__(self, monitor: TrainMonitor) -> None:
        super().__init__()
        self.monitor = monitor
        self._stop: TrainingStopped | None = None

    def on_train_begin(self, run_context: Any) -> None:
        """Have steps end at this callback."""
        del run_context
        self.monitor.ends_at_callback(True)

    def on_train_step_end(self, run_context: Any) -> None:
        """Log the loss of the step, and end it."""
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
        """Raise the stop that has ended the training.

        Raises:
            TrainingStopped: when a stop was asked for.

        """
        del run_context
        self.monitor.ends_at_callback(False)
        stop, self._stop = self._stop, None
        if stop is not None:
            raise stop
