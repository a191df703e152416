"""A step whose micro-steps get the same micro-batch, although they never did before."""

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

TWO: Final = 2
"""Micro-steps from which on there is something to compare."""


class RepeatedMicroBatchRule(Rule):
    """Compares all inputs of the model together between the micro-steps of a step, to the bit of their statistics.

    A loader whose iterator is made anew in each micro-step gives its first batch again and again; the gradients are
    then those of a smaller batch. A step is judged when the next one begins.
    """

    name: ClassVar[str] = "repeated_micro_batch"
    quantities: ClassVar[frozenset[str]] = frozenset({ACTIVATION_INPUT})
    statistics: ClassVar[frozenset[str]] = frozenset(STATISTICS)

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_input = arrays.series.column(bool, of=lambda s: s.is_model_input)
        self._has_micro_steps = arrays.series.column(bool, of=lambda s: s.micro_step > 0)
        self._step, self._different = -1, 0
        self._batches: dict[int, int] = {}  # the bits of all inputs, by micro-step
        self._first_input: dict[int, int] = {}

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the first input of a later micro-step of the step before that has an earlier one's batch."""
        record = observed.record
        if not self._has_micro_steps.values.any():
            return []
        rows = rows_where(self._is_input.values[record.where])
        if not len(rows):
            return []
        found: list[Finding] = []
        if record.step != self._step:
            found = self._end_step()
            self._step, self._batches = record.step, {}
        for row, bits in zip(rows.tolist(), fingerprints(record.values[rows]).tolist(), strict=True):
            series_id = int(record.ids[row])
            micro_step = observed.table.series[series_id].micro_step
            self._batches[micro_step] = (self._batches.get(micro_step, 0) * 31 + bits) % 2**53
            self._first_input.setdefault(micro_step, series_id)
        return found

    def _end_step(self) -> list[Finding]:
        """Count a step whose micro-batches all differ; before twenty do, one with the same begins the count anew."""
        firsts: dict[int, int] = {}
        again = [m for m in sorted(self._batches) if firsts.setdefault(self._batches[m], m) != m]
        if len(self._batches) < TWO or not again:
            self._different += len(self._batches) >= TWO
            return []
        if self._different < DIFFERENT_BEFORE:
            self._different = 0
            return []
        detail = (DUPLICATE_DATA, self.name, "batch", float(again[0]), 0.0, SCORE)
        series_id = self._first_input[again[0]]
        return [Finding(series_id, -1, *detail, step=self._step, last_clean=self._step - 1, passed_on=False)]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return which micro-step got an earlier one's batch."""
        return (
            f"micro-step {anomaly.value:.0f} of step {anomaly.step} got {subject} of an earlier one again, to the bit: "
            "the data loader gives each micro-step the same micro-batch"
        )
