"""A step whose micro-steps get the same micro-batch, although they never did before."""

from collections import deque
from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import DUPLICATE_DATA, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_INPUT
from trainsentry.collectors.statistics import STATISTICS

SCORE: Final = 60.0
"""Deviations: as strong as a rule whose bound holds for any run."""

DIFFERENT_BEFORE: Final = 20
"""Steps with different micro-batches before one with the same is a fault: some runs repeat a batch by design."""

REMEMBERED: Final = 256
CHANCE: Final = 1e-6
"""Micro-batches of earlier steps with which new ones are compared, and the probability below which steps in a row with
the same micro-batch are no chance. Masks and one-hot vectors of a few samples have few statistics: where some of
different steps are alike, their share says how often those of one step are. Where none ever was, one step is told."""

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
        self._in_row, self._since = 0, -1
        self._earlier: deque[int] = deque(maxlen=REMEMBERED)
        self._alike = self._compared = 0
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
            if record.step < self._step:  # the run goes back, and its batches come again
                self._earlier.clear()
            self._step, self._batches = record.step, {}
        for row, bits in zip(rows.tolist(), record.prints[rows].tolist(), strict=True):
            series_id = int(record.ids[row])
            micro_step = observed.table.series[series_id].micro_step
            self._batches[micro_step] = (self._batches.get(micro_step, 0) * 31 + bits) % 2**53
            self._first_input.setdefault(micro_step, series_id)
        return found

    def _end_step(self) -> list[Finding]:
        """Count a step whose micro-batches all differ; before twenty do, one with the same begins the count anew."""
        firsts: dict[int, int] = {}
        again = [m for m in sorted(self._batches) if firsts.setdefault(self._batches[m], m) != m]
        if len(self._batches) < TWO:
            return []
        pairs = len(self._batches) * (len(self._batches) - 1) / 2
        by_chance = pairs * self._alike / max(self._compared, 1)
        new = set(self._batches.values())
        self._alike += sum(batch in new for batch in self._earlier)
        self._compared += len(self._earlier) * len(new)
        self._earlier.extend(new)
        if not again:
            self._different, self._in_row = self._different + 1, 0
            return []
        if self._different < DIFFERENT_BEFORE:
            self._different = 0
            return []
        self._since = self._step if not self._in_row else self._since
        self._in_row += 1
        if min(by_chance, 1.0) ** self._in_row >= CHANCE:
            return []
        detail = (DUPLICATE_DATA, self.name, "batch", float(again[0]), 0.0, SCORE)
        series_id = self._first_input[again[0]]
        return [Finding(series_id, -1, *detail, step=self._since, last_clean=self._since - 1, passed_on=False)]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return which micro-step got an earlier one's batch."""
        return (
            f"micro-step {anomaly.value:.0f} of step {anomaly.step} got {subject} of an earlier one again, to the bit: "
            "the data loader gives each micro-step the same micro-batch"
        )
