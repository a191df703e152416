"""A loss scaler that skips so many steps that its scale collapses."""

from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import LOSS_SCALE_COLLAPSE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs; the skipped steps are lost whatever else is wrong."""

WINDOW: Final = 30
SKIPPED: Final = 10
"""Skipped steps of the last `WINDOW` at which the scale collapses: it is halved at each, a thousandfold together."""

STEPS_BEFORE: Final = 30
"""Steps in which a loss scaler may search for its scale."""


class LossScaleRule(Rule):
    """Counts the steps that the loss scaler skips, and reports a collapse once until it ends."""

    name: ClassVar[str] = "loss_scale_collapse"
    speaks_for: ClassVar[str | None] = LOSS_SCALE_COLLAPSE
    quantities: ClassVar[frozenset[str]] = frozenset()
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        self._skipped: list[int] = []
        self._first_step: int | None = None
        self._collapsed = False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the collapse at its first step."""
        record = observed.record
        if self._first_step is None:
            self._first_step = record.step
        self._skipped = [step for step in self._skipped if step > record.step - WINDOW]
        if record.skipped and (not self._skipped or self._skipped[-1] != record.step):
            self._skipped.append(record.step)
        collapsed = len(self._skipped) >= SKIPPED and record.step - self._first_step >= STEPS_BEFORE
        is_new, self._collapsed = collapsed and not self._collapsed, collapsed
        if not is_new or not len(record):
            return []
        return [Finding(-1, -1, LOSS_SCALE_COLLAPSE, self.name, "skipped", float(len(self._skipped)), 0.0, SCORE)]

    @staticmethod
    def sentence(anomaly: Anomaly, _subject: str) -> str:
        """Return how many steps were skipped; it concerns no single series."""
        return (
            f"the loss scaler skipped {anomaly.value:.0f} of the last {WINDOW} steps up to step {anomaly.step}: the "
            "loss scale is collapsing"
        )
