"""The one knob: how many false alarms the whole run may give, and whether a step is improbable enough for one."""

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from trainsentry.anomaly.baselines.calibration import Calibration

SPANS: Final = (1, 2, 4, 8)
"""Samples whose surprises are added up: what lasts is found when each sample alone is not enough."""

MARGIN: Final = 0.4
"""Share of the allowed rate that is aimed at, because rates are estimated."""

SUSPICION: Final = 20.0
"""Times the rate of alarms at which a step is suspicious: it is looked at closely, nobody is told."""

SUSPICION_LEAST: Final = 5e-3
"""Least p-value that is suspicious, so that a lone series with heavy tails is noted at one step in two hundred."""

MOST_LIKELY_ALARM: Final = 1e-2
"""However many false alarms are allowed, a step that is not this improbable gives none."""

DAY: Final = 86400.0


@dataclass(frozen=True, slots=True)
class Allowed:
    """False alarms that one rank may give: a rate in steps, or in days."""

    per_step: float | None = 5e-5
    per_day: float | None = None

    def in_a_step(self, seconds: float) -> float:
        """Return the probability of one in a step that takes `seconds`.

        >>> Allowed(None, 0.1).in_a_step(86.4)
        0.0001
        """
        if self.per_day is not None:
            return self.per_day * max(seconds, 1e-3) / DAY
        return self.per_step or 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step is: an alarm, or suspicious, and how improbable together with those before it, `span` in all."""

    alarm: bool
    suspicious: bool
    p: float
    span: int = 1


class Surprises:
    """Judges the surprise of records of one make-up (gradients alone, everything) by those before them."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=max(SPANS))
        self._calibrations = [Calibration() for _ in SPANS]
        self.sums: list[float] = []

    def judge(self, surprise: float, allowed: float, *, ready: bool = True) -> Verdict:
        """Return what a step of this surprise is, where `allowed` is the probability of a false alarm."""
        recent = [*self._recent, surprise]
        self.sums = [sum(recent[-span:]) / span**0.5 for span in SPANS if len(recent) >= span]
        ps = [c.p_value(s) for c, s in zip(self._calibrations, self.sums, strict=False)]
        p = min(1.0, min(ps) * len(SPANS))
        span = SPANS[ps.index(min(ps))]
        self._recent.append(surprise)
        aim = min(allowed * MARGIN, MOST_LIKELY_ALARM)
        return Verdict(p <= aim and ready, p <= max(SUSPICION * aim, SUSPICION_LEAST), p, span)

    def learn(self, sums: list[float]) -> None:
        """Take a step as a healthy one; `sums` are what `self.sums` was when it was judged."""
        for calibration, value in zip(self._calibrations, sums, strict=False):
            calibration.learn(value)

    def forget_last(self) -> None:
        """Leave an alarm out of the sums of the steps that follow."""
        self._recent.clear()

    def saved(self) -> list[Any]:
        """Return plain data."""
        return [c.saved() for c in self._calibrations]

    def load(self, saved: list[Any]) -> None:
        """Go on from what was saved."""
        for calibration, values in zip(self._calibrations, saved, strict=True):
            calibration.load(values)
