"""The monitor behind a trainer's callback: the callback ends its steps, and hands a stop to the trainer."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainsentry.anomaly.incident import Incident
from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.errors import TrainingStopped
from trainsentry.monitor.train_monitor import TrainMonitor

logger = logging.getLogger("trainsentry")

ConfigSource = str | Path | Mapping[str, Any] | MonitorConfig | None


class CallbackMonitor:
    """Starts a `TrainMonitor` when a trainer begins, and closes it when the trainer ends.

    `config` is as in `TrainMonitor`. `stopped` is the stop that ended the training, else None; `incidents` are those of
    the training that runs or ran last, worst first.

    Raises:
        ConfigError: for an unknown key or a value that is not allowed.

    """

    def __init__(self, config: ConfigSource = None) -> None:
        self.config = load_config(config)
        self.monitor: TrainMonitor | None = None
        self.stopped: TrainingStopped | None = None
        self._incidents: list[Incident] = []
        self._found: tuple[Incident, ...] = ()

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """The incidents of the training that runs, or of the last one after its end; worst first."""
        return self._found if self.monitor is None else self.monitor.incidents

    def begin(self, model: Any, optimizer: Any, *, start_step: int, state: Mapping[str, Any] | None = None) -> None:
        """Watch from `start_step` on; `state` is that of an earlier run at the same step.

        Raises:
            TypeError, ValueError: as `TrainMonitor.watch` does.

        """
        self.end()
        self.stopped = None
        monitor = TrainMonitor(self.config)
        monitor.on_incident(self._incidents.append)
        if state is not None:
            monitor.load_state_dict(state)
        monitor.watch(model, optimizer, start_step=start_step)
        monitor.ends_at_callback(True)
        self.monitor = monitor

    def log(self, **scalars: Any) -> None:
        """Record scalars in the current step."""
        if self.monitor is not None:
            self.monitor.log(**scalars)

    def end_step(self) -> TrainingStopped | None:
        """End the step; return a stop that the ranks have agreed on, for the trainer to carry out."""
        if self.monitor is None or self.stopped is not None:
            return self.stopped
        try:
            self.monitor.step_ended()
        except TrainingStopped as stop:
            self.stopped = stop
            logger.warning("trainsentry: the training stops at step %d: %s", stop.step, stop.reason)
        return self.stopped

    def take_incidents(self) -> list[Incident]:
        """Return the incidents since the last call, once each."""
        found = list(self._incidents)
        self._incidents.clear()
        return found

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for the trainer's checkpoint, as plain data; None before `begin`."""
        return self.monitor.state_dict() if self.monitor is not None else None

    def end(self) -> None:
        """Close the monitor. Safe to call twice."""
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            monitor.close()
            self._found = monitor.incidents
