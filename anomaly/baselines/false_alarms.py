"""The allowed rate of false alarms, and whether a step is improbable enough for an alarm at that rate."""

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from trainsentry.anomaly.baselines.calibration import Calibration

SPANS: Final = (1, 2, 4, 8)
"""Samples whose surprises are summed: a lasting change is found when no single sample is enough."""

MARGIN: Final = 0.4
"""Target rate, as a share of the allowed one, because rates are estimated."""

SUSPICION: Final = 20.0
"""Rate of suspicions, as a multiple of that of alarms: a suspicion asks for dense sampling and opens no incident."""

SUSPICION_LEAST: Final = 5e-3
"""p-value that is always suspicious, so that a lone series with heavy tails is noted at one step in two hundred."""

MOST_LIKELY_ALARM: Final = 1e-2
"""Largest p-value of an alarm, however many false alarms are allowed."""

DAY: Final = 86400.0


@dataclass(frozen=True, slots=True)
class Allowed:
    """Allowed false alarms of one rank: a rate per step, or per day."""

    per_step: float | None = 5e-5
    per_day: float | None = None

    def in_a_step(self, seconds: float) -> float:
        """Return the probability of a false alarm in a step that takes `seconds`.

        >>> Allowed(None, 0.1).in_a_step(86.4)
        0.0001
        """
        if self.per_day is not None:
            return self.per_day * max(seconds, 1e-3) / DAY
        return self.per_step or 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a step is an alarm or suspicious, and its p-value together with the steps before it, `span` in all."""

    alarm: bool
    suspicious: bool
    p: float
    span: int = 1


class Surprises:
    """Compares the surprise −log10 p of records with the same groups of series (gradients alone, all) over time."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=max(SPANS))
        self._calibrations = [Calibration() for _ in SPANS]
        self.sums: list[float] = []

    def judge(self, surprise: float, allowed: float, *, ready: bool = True) -> Verdict:
        """Return the verdict on a step of this surprise, where `allowed` is the probability of a false alarm."""
        recent = [*self._recent, surprise]
        self.sums = [sum(recent[-span:]) / span**0.5 for span in SPANS if len(recent) >= span]
        ps = [c.p_value(s) for c, s in zip(self._calibrations, self.sums, strict=False)]
        p = min(1.0, min(ps) * len(SPANS))
        span = SPANS[ps.index(min(ps))]
        self._recent.append(surprise)
        aim = min(allowed * MARGIN, MOST_LIKELY_ALARM)
        return Verdict(p <= aim and ready, p <= max(SUSPICION * aim, SUSPICION_LEAST), p, span)

    def learn(self, sums: list[float]) -> None:
        """Learn from a healthy step; `sums` is the value of `self.sums` after it was judged."""
        for calibration, value in zip(self._calibrations, sums, strict=False):
            calibration.learn(value)

    def forget_last(self) -> None:
        """Leave an alarm out of the sums of the following steps."""
        self._recent.clear()

    def saved(self) -> list[Any]:
        """Return plain data."""
        return [c.saved() for c in self._calibrations]

    def load(self, saved: list[Any]) -> None:
        """Restore saved calibrations."""
        for calibration, values in zip(self._calibrations, saved, strict=True):
            calibration.load(values)
