"""A data loader that repeats old batches: in the middle of an epoch, twice in a row, or after a resume."""

from collections import OrderedDict
from typing import Any, ClassVar, Final

from trainsentry.anomaly.anomaly import DUPLICATE_DATA, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.data.resumed_batches import IN_ORDER as RESUMED_IN_ORDER
from trainsentry.anomaly.rules.data.resumed_batches import RESUMED, ResumedBatches
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Integers, SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_INPUT, Series
from trainsentry.collectors.statistics import STATISTICS

PART: Final = ".part"
"""Ends the index of an input of which only the first samples are read."""

SCORE: Final = 20.0
"""Deviations: below the rules whose bounds hold for any run, as the order of batches is a habit."""

REMEMBERED: Final = 4096
"""Newest batches that are remembered, at 100 bytes each."""

LEAST_DIFFERENT: Final = 50
"""Different batches before the first repetition: some runs train on a few batches again and again by design."""

IN_ORDER: Final = 3
"""Repeated batches that must come in their old order: shuffled batches, and random draws, do not."""

LARGEST_SHARE: Final = 0.25
"""Share of the batches that may have been repeated before: above it the run repeats data by design (stages, epochs)."""


ECHO: Final = "echo"
ECHOES: Final = 3
ECHO_WINDOW: Final = 12
"""Batches that are that of the step before, and the steps within which so many of them are a fault: a loop may give one
batch twice where its first update was skipped."""


class RepeatedDataRule(Rule):
    """Finds a loader that repeats old batches: one comes a third time, and no new one came in between.

    It also finds one that serves batches twice in a row, where the first fifty were all different, and one that begins
    anew when a run resumes from a checkpoint.

    Batches are told apart by the model's inputs, where those are sampled at every step. A new epoch, in whatever order,
    is no finding, nor is a part of the data that is repeated and then followed by new batches.
    """

    name: ClassVar[str] = "repeated_data"
    speaks_for: ClassVar[str | None] = DUPLICATE_DATA
    quantities: ClassVar[frozenset[str]] = frozenset({ACTIVATION_INPUT})
    statistics: ClassVar[frozenset[str]] = frozenset(STATISTICS)
    state_key: ClassVar[str | None] = "batches"

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_input = arrays.series.column(bool, of=_is_input)
        self._step, self._batch = -1, 0
        # The bits of a batch: its place in the run, how often it came, and its first and its last step.
        self._seen: OrderedDict[int, tuple[int, int, int, int]] = OrderedDict()
        self._place = self._repeated = self._in_order = self._longest = 0
        self._last_place = self._since = -1
        self._by_design = False
        self._last_batch = -1
        self._echoes: list[int] = []  # the steps of batches that are that of the step before
        self._is_echo = self._echoes_by_design = False
        self._resumed = ResumedBatches()

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding if the batch of the step before is an old one; a step may come in several records."""
        record = observed.record
        rows = rows_where(self._is_input.values[record.where])
        if not len(rows):
            return []
        found: list[Finding] = []
        if record.step != self._step:
            if self._step >= 0:
                found = self._take(self._step, self._batch, int(record.ids[rows[0]]))
            if record.step != self._step + 1:  # the run went back, or steps in between were not sampled
                self._forget()
            self._step, self._batch = record.step, 0
        rows = _read_at_every_step(rows, [observed.table.series[i].index for i in record.ids[rows].tolist()])
        for bits in record.prints[rows].tolist():
            self._batch = (self._batch * 31 + bits) % 2**53
        return found

    def _take(self, step: int, bits: int, series_id: int) -> list[Finding]:
        found = self._take_echo(step, bits, series_id) + self._take_repeated(step, bits, series_id)
        return found + self._resumed.take(step, bits, series_id, self.name)

    def _take_repeated(self, step: int, bits: int, series_id: int) -> list[Finding]:
        known = self._seen.get(bits)
        if known is None:
            self._note_new(step, bits)
            return []
        place, times, first, last = known
        self._by_design |= len(self._seen) < LEAST_DIFFERENT
        self._repeated += times == 1
        self._by_design |= self._repeated > LARGEST_SHARE * len(self._seen)
        self._since = step if self._since < 0 else self._since
        self._in_order = self._in_order + 1 if place == self._last_place + 1 else 1
        self._longest, self._last_place = max(self._longest, self._in_order), place
        self._seen[bits] = (place, times + 1, first, step)
        if last < self._since or self._longest < IN_ORDER or self._by_design:
            return []
        self._by_design = True  # one finding is enough
        detail = (DUPLICATE_DATA, self.name, "batch", float(first), float("nan"), SCORE)
        return [Finding(series_id, -1, *detail, step=step, last_clean=self._since - 1, passed_on=False)]

    def _take_echo(self, step: int, bits: int, series_id: int) -> list[Finding]:
        """Return a finding where this batch and two shortly before are each that of the step before, and no more."""
        same, was_echo = bits == self._last_batch, self._is_echo
        self._last_batch, self._is_echo = bits, same
        if not same or was_echo or self._echoes_by_design:  # one that comes a third time is a stuck loader's
            return []
        self._echoes_by_design = len(self._seen) < LEAST_DIFFERENT
        self._echoes = [*(s for s in self._echoes if s > step - ECHO_WINDOW), step]
        if len(self._echoes) < ECHOES or self._echoes_by_design:
            return []
        self._echoes_by_design = True  # one finding is enough
        first = self._echoes[0]
        detail = (DUPLICATE_DATA, self.name, ECHO, float(first - 1), float("nan"), SCORE)
        return [Finding(series_id, -1, *detail, step=first, last_clean=first - 1, passed_on=False)]

    def _note_new(self, step: int, bits: int) -> None:
        self._seen[bits] = (self._place, 1, step, step)
        self._place, self._in_order, self._longest, self._last_place, self._since = self._place + 1, 0, 0, -1, -1
        if len(self._seen) > REMEMBERED:
            _, (_, times, _, _) = self._seen.popitem(last=False)
            self._repeated -= times > 1

    def _forget(self) -> None:
        self._echoes, self._last_batch, self._is_echo = [], -1, False
        self._seen.clear()
        self._place = self._repeated = self._in_order = self._longest = 0
        self._last_place = self._since = -1
        self._by_design = False

    def saved(self, count: int) -> list[list[int]]:
        """Return the batches that the rule remembers."""
        return self._resumed.saved(self._step, self._batch)

    def load(self, saved: Any) -> None:
        """Go on from a checkpoint; what came since it was saved is forgotten."""
        self._resumed.load(saved)
        self._step = -1
        self._forget()

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return which old batch came again."""
        if anomaly.statistic == RESUMED:
            return (
                f"the data loader began anew after the resume: {subject} of step {anomaly.step} is the batch of step "
                f"{anomaly.value:.0f} again, and the next {RESUMED_IN_ORDER - 1} follow as they did then"
            )
        if anomaly.statistic == ECHO:
            return (
                f"the data loader serves batches twice: {subject} of step {anomaly.step} is the batch of step "
                f"{anomaly.value:.0f} again, and so it was twice more within {ECHO_WINDOW} steps"
            )
        return (
            f"the data loader is repeating a few old batches: {subject} of step {anomaly.step} is the batch of step "
            f"{anomaly.value:.0f}, for the third time"
        )


def _read_at_every_step(rows: Integers, indices: list[str]) -> Integers:
    """Return the rows without those of whole inputs of which a part is read at every step."""
    parts = {index.removesuffix(PART) for index in indices if index.endswith(PART)}
    return rows[[index not in parts for index in indices]] if parts else rows


def _is_input(series: Series) -> bool:
    return series.is_model_input and not series.scalar
