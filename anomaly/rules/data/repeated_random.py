"""Random numbers that come again: a generator was seeded, or put back, in the midst of a run."""

from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import STALE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import REPEATED_RANDOM
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as the states of a generator never repeat by chance."""


class RepeatedRandomRule(Rule):
    """Tells of the first row of `repeated_random`, once for each device.

    An evaluation that seeds and does not put back what was before makes the training draw the same dropout masks and
    noise after each one. A run that goes back to an earlier step draws what it drew there, by right.
    """

    name: ClassVar[str] = "repeated_random"
    quantities: ClassVar[frozenset[str]] = frozenset({REPEATED_RANDOM})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        prefix = f"{REPEATED_RANDOM}."
        self._is_repeated = arrays.series.column(bool, of=lambda s: s.scalar and s.name.startswith(prefix))
        self._told: set[str] = set()
        self._newest = -1

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the devices whose random numbers come again for the first time."""
        record, found = observed.record, []
        is_redone = record.step < self._newest
        self._newest = max(self._newest, record.step)
        for row in rows_where(self._is_repeated.values[record.where]).tolist():
            series_id = int(record.ids[row])
            device = observed.table.series[series_id].name.partition(".")[2]
            if device in self._told or is_redone:
                continue
            self._told.add(device)
            before = record.step - float(record.values[row, VALUE])
            detail = (STALE, self.name, "state", before, float("nan"), SCORE)
            where = {"step": record.step, "last_clean": record.step - 1, "passed_on": False}
            name = f"random numbers on {device}"
            found.append(Finding(series_id, row, *detail, **where, name=name, quantity="training"))  # type: ignore[arg-type]
        return found

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return which step's numbers came again."""
        return (
            f"torch's {subject} at step {anomaly.step} are those of step {anomaly.value:.0f} again: the program seeded "
            "their generator, or put its state back, before the forward pass"
        )
