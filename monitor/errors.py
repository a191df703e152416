"""The exceptions that users handle."""

from trainsentry.anomaly.incident import Incident
from trainsentry.collectors.guard import PassThrough


class ConfigError(ValueError):
    """A mistake in the configuration; the message names the key, the value and the allowed values."""


class TrainingStopped(PassThrough):
    """Raised at a step boundary, on every rank at the same step, when a stop was requested.

    `step` is the step at whose boundary it was raised, `incident` the incident that caused the stop, if any.
    """

    def __init__(self, step: int, reason: str, incident: Incident | None = None) -> None:
        super().__init__(f"training stopped at step {step}: {reason}")
        self.step = step
        self.reason = reason
        self.incident = incident


class OverflowLimitReached(TrainingStopped):
    """The configured number of steps with an overflow (`overflow_nums`) was reached."""
