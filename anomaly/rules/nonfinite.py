"""NaN or Inf where the run had none."""

from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import NONFINITE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import EVERY_TENSOR, Observed, Rule
from trainsentry.anomaly.series_arrays import Mask, SeriesArrays, rows_where
from trainsentry.anomaly.series_facts import SeriesFacts
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.statistics import INFS, NANS

SCORE: Final = 1000.0
"""Score of a non-finite value, in deviations: above every distance from normal that a score reaches in practice."""


class NonfiniteRule(Rule):
    """Finds rows that count a NaN or Inf.

    An activation or buffer that holds Inf at its first sample (a mask filled with -Inf) does so by design: its Inf is
    not reported, its NaN always is.
    """

    name: ClassVar[str] = "nonfinite"
    speaks_for: ClassVar[str | None] = NONFINITE
    quantities: ClassVar[frozenset[str]] = frozenset({EVERY_TENSOR, "loss", "grad_norm"})
    statistics: ClassVar[frozenset[str]] = frozenset({"nans", "infs"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._seen = arrays.series.column(bool)
        self._holds_inf = arrays.series.column(bool)

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding for each judged row that is not finite."""
        self.wrong_rows = self.rows(observed.record, observed.facts)
        rows = rows_where(self.wrong_rows & observed.judged).tolist()
        return [self.finding(observed.record, row) for row in rows]

    def rows(self, record: StepRecord, facts: SeriesFacts) -> Mask:
        """Return which rows are not finite although they should be, shape (n,)."""
        where = record.where
        nans, infs = record.columns[NANS] > 0, record.columns[INFS] > 0
        seen, holds_inf = self._seen.values, self._holds_inf.values
        if not seen[where].all():
            first = ~seen[where]
            holds_inf[record.ids[first & infs & ~nans & facts.may_mask[where]]] = True
            seen[where] = True
        found: Mask = nans | (infs & ~holds_inf[where])
        return found

    def known_rows(self, record: StepRecord) -> Mask:
        """Return which rows of series seen before are not finite although they should be, shape (n,); learn nothing."""
        where = record.where
        wrong = (record.columns[NANS] > 0) | ((record.columns[INFS] > 0) & ~self._holds_inf.values[where])
        found: Mask = wrong & self._seen.values[where]
        return found

    @staticmethod
    def finding(record: StepRecord, row: int) -> Finding:
        """Return the finding for a row that is not finite."""
        nans, infs = record.values[row, [NANS, INFS]].tolist()
        statistic, count = ("nans", nans) if nans > 0 else ("infs", infs)
        return Finding(int(record.ids[row]), row, NONFINITE, NonfiniteRule.name, statistic, count, 0.0, SCORE)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return how many elements are NaN or Inf."""
        number = f"{anomaly.value:.0f}"
        kind = {"nans": "NaN", "infs": "Inf"}.get(anomaly.statistic, "non-finite")
        return f"{subject} holds {number} {kind} {'value' if number == '1' else 'values'} at step {anomaly.step}"
