"""A step whose micro-steps get the same micro-batch, although they never did before."""

from collections import Counter
from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import DUPLICATE_DATA, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_INPUT
from trainsentry.collectors.statistics import STATISTICS, fingerprints

SCORE: Final = 60.0
"""Deviations: as strong as a rule whose bound holds for any run. Fingerprints of different batches differ."""

DIFFERENT_BEFORE: Final = 20
"""Steps with different micro-batches before one with the same is a fault: some runs repeat a batch by design."""


class RepeatedMicroBatchRule(Rule):
    """Compares each input of the model between the micro-steps of a step, to the bit of its statistics.

    A loader whose iterator is made anew in each micro-step gives its first batch again and again; the gradients are
    then those of a smaller batch. Inputs that are the same by design, such as masks, were so before.
    """

    name: ClassVar[str] = "repeated_micro_batch"
    quantities: ClassVar[frozenset[str]] = frozenset({ACTIVATION_INPUT})
    statistics: ClassVar[frozenset[str]] = frozenset(STATISTICS)

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_input = arrays.series.column(bool, of=lambda s: s.quantity == ACTIVATION_INPUT and s.module == "")
        self._has_micro_steps = arrays.series.column(bool, of=lambda s: s.micro_step > 0)
        self._step = -1
        self._seen: dict[str, dict[int, int]] = {}  # by name: the first micro-step with some bits
        self._calls: Counter[str] = Counter()
        self._different: Counter[str] = Counter()

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the input of a later micro-step that an earlier one had; a step may come in several records."""
        record = observed.record
        if not self._has_micro_steps.values.any():
            return []
        rows = rows_where(self._is_input.values[record.where])
        if not len(rows):
            return []
        if record.step != self._step:
            self._end_step()
            self._step = record.step
        found = []
        for row, bits in zip(rows.tolist(), fingerprints(record.values[rows]).tolist(), strict=True):
            series = observed.table.series[record.ids[row]]
            first = self._seen.setdefault(series.name, {}).setdefault(bits, series.micro_step)
            self._calls[series.name] += 1
            if first < series.micro_step and self._different[series.name] >= DIFFERENT_BEFORE:
                detail = (DUPLICATE_DATA, self.name, "batch", float(series.micro_step), 0.0, SCORE)
                found.append(Finding(int(record.ids[row]), row, *detail, passed_on=False))
        return found[:1]

    def _end_step(self) -> None:
        """Count a step whose micro-batches all differed; until they always do, one with the same begins it anew."""
        for name, calls in self._calls.items():
            if calls > 1 and len(self._seen[name]) == calls:
                self._different[name] += 1
            elif self._different[name] < DIFFERENT_BEFORE:
                self._different[name] = 0
        self._seen, self._calls = {}, Counter()

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return which micro-step got an earlier one's batch."""
        return (
            f"micro-step {anomaly.value:.0f} of step {anomaly.step} got {subject} of an earlier one again, to the bit: "
            "the data loader gives each micro-step the same micro-batch"
        )
