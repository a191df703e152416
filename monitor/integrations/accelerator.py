"""A tracker for Hugging Face accelerate: what is logged to the Accelerator is recorded beside the model."""

from typing import Any

from accelerate.tracking import GeneralTracker

from trainsentry.monitor.integrations.callback_monitor import ConfigSource
from trainsentry.monitor.train_monitor import TrainMonitor


class AccelerateTracker(GeneralTracker):  # type: ignore[misc] # read without its types
    """Watches a loop of one's own that uses an `Accelerator`.

    >>> tracker = AccelerateTracker()  # doctest: +SKIP
    >>> accelerator = Accelerator(log_with=tracker)  # doctest: +SKIP
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    >>> tracker.watch(model, optimizer)  # doctest: +SKIP

    `accelerator.log` records numbers as scalars; call it before `optimizer.step()`, so that they belong to that step.
    `accelerator.register_for_checkpointing(tracker.monitor)` saves and loads the detectors' state with the
    Accelerator's own; `accelerator.end_training()` closes the monitor. `log_with` takes other trackers beside it.

    Raises:
        ConfigError: for an unknown key or a value that is not allowed.

    """

    name = "trainsentry"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, config: ConfigSource = None) -> None:
        self.monitor = TrainMonitor(config)
        self._watches = False
        super().__init__()

    @property
    def tracker(self) -> TrainMonitor:
        """The monitor, for `accelerator.get_tracker("trainsentry", unwrap=True)`."""
        return self.monitor

    def watch(self, model: Any, optimizer: Any, **settings: Any) -> TrainMonitor:
        """Watch what `accelerator.prepare` has returned; `settings` are those of `TrainMonitor.watch`.

        Raises:
            TypeError, ValueError: as `TrainMonitor.watch` does.

        """
        self.monitor.watch(model, optimizer, **settings)
        self._watches = True
        return self.monitor

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Do nothing: hyperparameters are not recorded."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Record the numbers among `values` in the current step; others, and `step`, are left out."""
        numbers = {name: value for name, value in values.items() if _is_number(value)}
        if numbers and self._watches:
            self.monitor.log(**numbers)

    def finish(self) -> None:
        """Close the monitor."""
        self.monitor.close()


def _is_number(value: Any) -> bool:
    return not isinstance(value, (str, bool)) and (isinstance(value, (int, float)) or hasattr(value, "numel"))
