"""A buffer or a weight that was kept up to date and is so no more: a forgotten call, one of several optimizers."""

from collections.abc import Sequence
from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import STALE, Anomaly
from trainsentry.anomaly.called_modules import CalledModules
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_QUANTITIES, BUFFER, PARAMETER, STOPPED_WRITES, Series
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as writes are counted and are no estimate."""

BETWEEN_LOOKS: Final = 9
"""Steps before the last look that found something written, at which it may have stopped: an average that follows an
update shows with the next one, and the collector looks at every eighth."""


class StoppedWritesRule(Rule):
    """Judges `stopped_writes` by the next step whose activations are sampled.

    Where the module that holds the tensor is called no more, as a teacher or a head that is trained for a while, it
    rests by right. A copy that keeps averages, for evaluations, is never called while the model trains, and was written
    all the same.
    """

    name: ClassVar[str] = "stopped_writes"
    quantities: ClassVar[frozenset[str]] = frozenset({STOPPED_WRITES}) | ACTIVATION_QUANTITIES
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        self._called = CalledModules(arrays)
        prefix = f"{STOPPED_WRITES}."
        self._is_count = arrays.series.column(bool, of=lambda s: s.scalar and s.name.startswith(prefix))
        self._parameters: set[str] = set()
        arrays.series.before_growth(self._note_new)
        self._due: dict[int, int] = {}  # the step at which each was written no more, by its series
        self._step = -1

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the tensors that are written no more, when the step that shows their modules' calls has ended."""
        record, found = observed.record, []
        if record.step != self._step:
            if self._due and self._called.knows_step:
                found = self._found(observed)
                self._due.clear()
            self._called.begin_step()
            self._step = record.step
        self._called.note(record)
        for row in rows_where(self._is_count.values[record.where]).tolist():
            self._due[int(record.ids[row])] = max(record.step - int(record.values[row, VALUE]), 0)
        return found

    def _found(self, observed: Observed) -> list[Finding]:
        found = []
        for series_id, since in self._due.items():
            series = observed.table.series[series_id]
            if self._called.was_called(series) is True or self._called.never(series):
                name = series.name.removeprefix(f"{STOPPED_WRITES}.")
                quantity = PARAMETER if name in self._parameters else BUFFER
                clean = max(since - BETWEEN_LOOKS, -1)
                where = {"step": since, "last_clean": clean, "passed_on": False, "name": name, "quantity": quantity}
                found.append(Finding(series_id, -1, STALE, self.name, "stopped", 0.0, 1.0, SCORE, **where))  # type: ignore[arg-type]
        return found

    def _note_new(self, first: int, new: Sequence[Series]) -> None:
        self._parameters |= {series.name for series in new if series.quantity == PARAMETER}

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return since when the tensor is not kept up to date."""
        return (
            f"{subject} is not updated any more since step {anomaly.step}: what wrote to it again and again until "
            "then, its optimizer or other code, does so no more, and nothing else shows that it may rest"
        )
