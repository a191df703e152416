"""Invariant: while an epoch lasts, data does not go round a few of its batches."""

from collections import OrderedDict
from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import DUPLICATE_DATA
from trainsentry.anomaly.finding import Finding
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_INPUT, SeriesTable
from trainsentry.collectors.statistics import fingerprints

NAME: Final = "repeated_data"
SCORE: Final = 20.0

KEPT: Final = 4096
"""Batches that are remembered, the newest ones: 100 bytes each."""

LEAST_FRESH: Final = 50
"""Different batches before the first that comes again. Who goes over a few batches again and again means to."""

IN_ORDER: Final = 3
"""Batches that come again in their old order: shuffled ones, and ones drawn with replacement, do not."""

LARGEST_SHARE: Final = 0.25
"""Share of the batches that may have come again: beyond it, this is how the run goes over its data (stages, epochs)."""


class RepeatedDataRule:
    """Finds a loader that goes round a few old batches: one comes a third time, and nothing new came in between.

    Batches are told apart by the model's inputs, where those are sampled at every step. An epoch that begins anew, in
    whatever order, is no finding, nor is a part of the data that comes again and then gives way to what is new.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._is_input = np.zeros(0, bool)
        self._step, self._print = -1, 0
        # The bits of a batch: its place, how often it came, and its first and its last step.
        self._seen: OrderedDict[int, tuple[int, int, int, int]] = OrderedDict()
        self._place = self._again = self._in_order = self._longest = 0
        self._last_place = self._since = -1
        self._is_usual = False

    def judge(self, record: StepRecord) -> list[Finding]:
        """Return that the batch of the step before is an old one; a step may come in several records."""
        new = self.table.series[len(self._is_input) :]
        if new:
            inputs = [s.quantity == ACTIVATION_INPUT and s.module == "" and not s.scalar for s in new]
            self._is_input = np.append(self._is_input, inputs)
        rows = np.flatnonzero(self._is_input[record.where])
        if not len(rows):
            return []
        found: list[Finding] = []
        if record.step != self._step:
            if self._step >= 0:
                found = self._take(self._step, self._print, int(record.ids[rows[0]]))
            if record.step != self._step + 1:  # a run that went back, or steps in between that were not seen
                self._begin_anew()
            self._step, self._print = record.step, 0
        for bits in fingerprints(record.values[rows]).tolist():
            self._print = (self._print * 31 + bits) % 2**53
        return found

    def _take(self, step: int, bits: int, series_id: int) -> list[Finding]:
        known = self._seen.get(bits)
        if known is None:
            self._note_new(step, bits)
            return []
        place, times, first, last = known
        self._is_usual |= len(self._seen) < LEAST_FRESH
        self._again += times == 1
        self._is_usual |= self._again > LARGEST_SHARE * len(self._seen)
        self._since = step if self._since < 0 else self._since
        self._in_order = self._in_order + 1 if place == self._last_place + 1 else 1
        self._longest, self._last_place = max(self._longest, self._in_order), place
        self._seen[bits] = (place, times + 1, first, step)
        if last < self._since or self._longest < IN_ORDER or self._is_usual:
            return []
        self._is_usual = True  # said once: what comes again after it is known
        nan, clean = float("nan"), self._since - 1
        return [Finding(series_id, -1, DUPLICATE_DATA, NAME, "batch", first, nan, SCORE, True, step, clean, False)]

    def _note_new(self, step: int, bits: int) -> None:
        self._seen[bits] = (self._place, 1, step, step)
        self._place, self._in_order, self._longest, self._last_place, self._since = self._place + 1, 0, 0, -1, -1
        if len(self._seen) > KEPT:
            _, (_, times, _, _) = self._seen.popitem(last=False)
            self._again -= times > 1

    def _begin_anew(self) -> None:
        self._seen.clear()
        self._place = self._again = self._in_order = self._longest = 0
        self._last_place = self._since = -1
        self._is_usual = False
