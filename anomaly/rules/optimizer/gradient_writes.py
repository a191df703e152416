"""Gradients that are written more or less often before an update than at all updates before, or not at all."""

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import GRADIENT_FLOW, STALE, Anomaly
from trainsentry.anomaly.finding import ALL, Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import (
    GRADIENT,
    GRADIENT_WRITES,
    LOOKED_AT_EVERY,
    STALE_UPDATE,
    Series,
)
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as the number is counted and is no estimate."""

SETTLED: Final = 20
"""Steps with one count before another is judged: loops that clip only large gradients change it within a few."""

LASTS: Final = 2
"""Steps that another count must last: an exception that the loop catches may cost one step its update."""

ONE: Final = "writes of one"
"""The statistic of a single gradient that is written more often than the others."""


@dataclass(slots=True)
class _Count:
    """The count of an optimizer: its newest value, since which step, and every value that it had before.

    `series_id` is that of the newest row; `module` holds all parameters of one of several optimizers.
    """

    series_id: int
    module: str
    value: float
    since: int
    usual: float
    known: set[float]
    settled: bool = False


class GradientWritesRule(Rule):
    """Judges `gradient_writes` when it changes: a loop's calls of backward, clip and zero_grad do not change.

    A count that the run has had before is no finding; the row of a single gradient is one by itself. An update with the
    very gradients of the one before is one, unless the run began so.
    """

    name: ClassVar[str] = "gradient_writes"
    speaks_for: ClassVar[str | None] = GRADIENT_FLOW
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT_WRITES, STALE_UPDATE, GRADIENT})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        prefix = f"{GRADIENT_WRITES}."
        self._is_count = arrays.series.column(bool, of=lambda s: s.scalar and s.name.startswith(prefix))
        stale = f"{STALE_UPDATE}."
        self._is_stale = arrays.series.column(bool, of=lambda s: s.scalar and s.name.startswith(stale))
        self._has_stale = False
        self._first_step = -1
        self._counts: dict[str, _Count] = {}
        self._began: dict[int, int] = {}  # the steps at which single gradients were first written more often
        self._update = arrays.series.column(np.int64, -1, of=lambda s: s.micro_step if s.quantity == GRADIENT else -1)
        self._step = self._updates = self._updates_before = self._joined = -1

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the counts that have lasted and are new."""
        record = observed.record
        self._note_updates(observed)
        single = []
        for row in rows_where(self._is_count.values[record.where]).tolist():
            series_id = int(record.ids[row])
            series, value = observed.table.series[series_id], float(record.values[row, VALUE])
            name = series.name.split(".", 2)[2:]
            if name and not value:
                self._began[series_id] = record.step
            elif name:
                single.append(self._of_one(series_id, name[0], value, record.step))
            else:
                self._take(series, series_id, value, record.step)
        return (
            single
            + self._stale(observed)
            + [
                self._finding(count)
                for count in self._counts.values()
                if count.value not in count.known and record.step >= count.since + LASTS and self._is_new(count)
            ]
        )

    def _of_one(self, series_id: int, name: str, more: float, step: int) -> Finding:
        """Return the finding of a gradient that something has written to again and again."""
        since = self._began.get(series_id, step)
        detail = (GRADIENT_FLOW, self.name, ONE, more, 0.0, SCORE)
        where = {"step": since, "last_clean": max(since - LOOKED_AT_EVERY, -1), "passed_on": False}
        return Finding(series_id, -1, *detail, **where, name=name, quantity=GRADIENT)  # type: ignore[arg-type]

    def _stale(self, observed: Observed) -> list[Finding]:
        """Return, once, an update with old gradients in a run that had none in its first steps."""
        record = observed.record
        self._first_step = record.step if self._first_step < 0 else self._first_step
        rows = rows_where(self._is_stale.values[record.where])
        if not len(rows) or self._has_stale:
            return []
        self._has_stale = True
        if record.step < self._first_step + SETTLED:
            return []
        detail = (STALE, self.name, "writes", 0.0, 1.0, SCORE)
        where = {"last_clean": record.step - 1, "passed_on": False}
        name = observed.table.series[record.ids[rows[0]]].module or ALL
        return [Finding(int(record.ids[rows[0]]), -1, *detail, **where, name=name, quantity=GRADIENT)]  # type: ignore[arg-type]

    def _note_updates(self, observed: Observed) -> None:
        """Begin anew where a step had other updates of one parameter than the step before: a critic's are fewer."""
        record = observed.record
        if record.step != self._step:
            if self._updates >= 0 and self._updates != self._updates_before:
                self._begin_anew(self._step)
            if self._updates >= 0:
                self._updates_before = self._updates
            self._step, self._updates = record.step, -1
        self._updates = max(self._updates, int(self._update.values[record.where].max(initial=-1)))

    def _begin_anew(self, step: int) -> None:
        self._joined = step
        for count in self._counts.values():
            count.settled = False

    def _take(self, series: Series, series_id: int, value: float, step: int) -> None:
        known = self._counts.get(series.name)
        if known is None:
            self._begin_anew(step)  # an optimizer joins, and with it a step's updates are others
            self._counts[series.name] = _Count(series_id, series.module, value, step, value, {value})
            return
        known.series_id, known.module = series_id, series.module
        lasted = step - max(known.since, self._joined)
        if lasted >= SETTLED:
            known.settled, known.usual = True, known.value
        if lasted >= LASTS or not known.settled:
            known.known.add(known.value)
        known.settled &= lasted >= SETTLED or value in known.known
        known.value, known.since = value, step

    @staticmethod
    def _is_new(count: _Count) -> bool:
        """Note a count that has lasted; return whether another was settled before it."""
        count.known.add(count.value)
        return count.settled

    def _finding(self, count: _Count) -> Finding:
        detail = (GRADIENT_FLOW, self.name, "writes", count.value, count.usual, SCORE)
        where = {"step": count.since, "last_clean": count.since - 1, "passed_on": False}
        name = count.module or ALL
        return Finding(count.series_id, -1, *detail, **where, name=name, quantity=GRADIENT)  # type: ignore[arg-type]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return by how much the count differs, and what does that."""
        if anomaly.kind == STALE:
            return f"the optimizer's update at step {anomaly.step} used the gradients of the update before it again"
        if anomaly.statistic == ONE:
            times = f"{anomaly.value:.0f} times" if anomaly.value > 1 else "one time"
            return f"something writes to {subject} {times} more often before each update than to the other gradients"
        more = round(anomaly.value - anomaly.expected) if isfinite(anomaly.value - anomaly.expected) else 0
        whose = "the gradients are" if anomaly.name == ALL else f"{subject} is"
        times = f"{abs(more)} time{'' if abs(more) == 1 else 's'} {'more' if more > 0 else 'less'} before each update"
        they = "they are" if anomaly.name == ALL else "it is"
        reasons = (
            f"{they} kept from the step before, computed twice, zeroed, cast, or scaled or clipped once more"
            if more > 0
            else f"{they} zeroed between micro-steps, or no longer cast, clipped or unscaled"
        )
        return f"from step {anomaly.step} on {whose} written {times} than until then: {reasons}"
