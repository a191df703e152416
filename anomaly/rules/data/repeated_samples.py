"""A batch of which many samples are copies of others, although they never were."""

from dataclasses import dataclass
from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import DUPLICATE_DATA, Anomaly
from trainsentry.anomaly.finding import DATA, Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import REPEATED_SAMPLES
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 60.0
"""Deviations: as strong as a rule whose bound holds for any run; copies are counted, and no estimate."""

SAMPLES_BEFORE: Final = 6
"""Samplings of activations in which batches had few copies, before one with many counts."""

FEW: Final = 0.05
MANY: Final = 0.2
"""Shares of a batch: who draws with replacement gets some copies, a worker that repeats its part gives a half."""

LASTS: Final = 2
"""Samplings in a row with many copies: a small file that ends an epoch may be read twice."""


@dataclass(slots=True)
class _Copies:
    """How many samplings had few copies, since which step one after the other has many, and the last step without."""

    few: int = 0
    many: int = 0
    since: int = -1
    clean: int = -1
    step: int = -1


class RepeatedSamplesRule(Rule):
    """Looks at `repeated_samples.<input>`: two workers with one seed, or a batch made of one half twice."""

    name: ClassVar[str] = "repeated_samples"
    quantities: ClassVar[frozenset[str]] = frozenset({REPEATED_SAMPLES})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        prefix = f"{REPEATED_SAMPLES}."
        self._is_share = arrays.series.column(bool, of=lambda s: s.scalar and s.name.startswith(prefix))
        self._copies: dict[int, _Copies] = {}

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the inputs of which many samples are copies since some step, once each."""
        record = observed.record
        found = []
        for row in rows_where(self._is_share.values[record.where]).tolist():
            series_id, share = int(record.ids[row]), float(record.values[row, VALUE])
            known = self._copies.setdefault(series_id, _Copies())
            if record.step < known.step:  # the run has gone back
                known = self._copies[series_id] = _Copies()
            if record.step == known.step:  # a second call of the model
                continue
            before, known.step = known.step, record.step
            if share < MANY:
                known.few, known.many = (known.few + 1 if share <= FEW else 0), 0
                continue
            if known.many == 0:
                known.since, known.clean = record.step, before
            known.many += 1
            if known.many == LASTS and known.few >= SAMPLES_BEFORE:
                name = observed.table.series[series_id].name.partition(".")[2]
                found.append(self._finding(series_id, name, share, known))
            if known.many >= LASTS:
                known.few = 0
        return found

    def _finding(self, series_id: int, name: str, share: float, known: _Copies) -> Finding:
        detail = (DUPLICATE_DATA, self.name, "share", share, 0.0, SCORE)
        where = {"step": known.since, "last_clean": known.clean, "passed_on": False}
        return Finding(series_id, -1, *detail, **where, name=name, quantity=DATA)  # type: ignore[arg-type]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the share of copies."""
        return (
            f"{anomaly.value:.2g} of the samples in a batch of {subject} are copies of others from step {anomaly.step} "
            "on; next to none was before"
        )
