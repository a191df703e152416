"""The outcome of a demo run."""

from dataclasses import dataclass

from trainsentry.anomaly.incident import Incident
from trainsentry.monitor.errors import TrainingStopped


@dataclass(frozen=True)
class Flip:
    """One bit of one element of one parameter, counted in the flattened tensor."""

    parameter: str
    element: int
    bit: int
    before: float
    after: float


@dataclass(frozen=True)
class Outcome:
    """The number of steps, the loss of every step, the flip if there was one, the incidents, and the stop."""

    steps: int
    losses: tuple[float, ...]
    flip: Flip | None
    flip_step: int | None
    incidents: tuple[Incident, ...]
    stopped: TrainingStopped | None

    @property
    def found(self) -> bool:
        """Whether the first suspect is the flipped parameter; without a flip, whether there is no incident."""
        if self.flip is None:
            return not self.incidents
        return bool(self.incidents) and self.incidents[0].name == self.flip.parameter
