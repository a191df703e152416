"""Buffers that are written more often between updates than others that were written like them."""

from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import RECURRENCE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import BUFFER, BUFFER_WRITES
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as the number is counted and is no estimate."""

LASTS: Final = 10
"""Steps for which a buffer must be written more often: code books are repaired, and statistics estimated anew, now and
then."""


class BufferWritesRule(Rule):
    """Judges `buffer_writes`, once for each buffer: a stale copy, an alias or a broadcast sets it beside its module."""

    name: ClassVar[str] = "buffer_writes"
    quantities: ClassVar[frozenset[str]] = frozenset({BUFFER_WRITES})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        prefix = f"{BUFFER_WRITES}."
        self._is_count = arrays.series.column(bool, of=lambda s: s.scalar and s.name.startswith(prefix))
        self._more: dict[int, tuple[int, float]] = {}
        self._known: set[int] = set()

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the buffers that have been written more often for long enough."""
        record = observed.record
        for row in rows_where(self._is_count.values[record.where]).tolist():
            series_id, more = int(record.ids[row]), float(record.values[row, VALUE])
            if more > 0 and series_id not in self._known:
                self._more.setdefault(series_id, (record.step, more))
            else:
                self._known.add(series_id)  # it was for a few steps, which may come back by design
                self._more.pop(series_id, None)
        due = [i for i, (since, _) in self._more.items() if record.step >= since + LASTS]
        self._known.update(due)
        return [self._finding(observed, series_id, *self._more.pop(series_id)) for series_id in due]

    def _finding(self, observed: Observed, series_id: int, since: int, more: float) -> Finding:
        buffer = observed.table.series[series_id].name.removeprefix(f"{BUFFER_WRITES}.")
        detail = (RECURRENCE, self.name, "writes", more, 0.0, SCORE)
        where = {"step": since, "last_clean": since - 1, "passed_on": False}
        return Finding(series_id, -1, *detail, **where, name=buffer, quantity=BUFFER)  # type: ignore[arg-type]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return how many times more it is written."""
        times = f"{anomaly.value:.0f} time{'' if anomaly.value == 1 else 's'}"
        return (
            f"{subject} is written {times} more before each update since step {anomaly.step}, and those that were "
            "written like it are not: something sets it beside its module"
        )
