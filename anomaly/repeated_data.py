"""Invariant: within an epoch no batch comes again before all others have come."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.anomaly import DUPLICATE_DATA
from trainsentry.anomaly.finding import Finding
from trainsentry.collectors.fingerprints import fingerprints
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_INPUT, SeriesTable

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
    """Finds batches that are served again although the epoch is not over.

    Batches are told apart by the bits of the model's inputs, where those are sampled. That an epoch begins anew is no
    finding, in whatever order: then every batch comes a second time before any comes a third time, or a new one comes.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._is_input = np.zeros(0, bool)
        self._step, self._print = -1, 0
        self._seen: OrderedDict[int, list[int]] = OrderedDict()  # bits of a batch: its place, how often, its step
        self._place = self._again = self._in_order = self._longest = 0
        self._last, self._clean = -1, -1
        self._is_usual = False

    def judge(self, record: StepRecord) -> list[Finding]:
        """Return that the batch before is an old one; a step may come in several records."""
        new = self.table.series[len(self._is_input) :]
        if new:
            inputs = [s.quantity == ACTIVATION_INPUT and s.module == "" and not s.scalar for s in new]
            self._is_input = np.append(self._is_input, inputs)
        rows = np.flatnonzero(self._is_input[record.ids])
        if not len(rows):
            return []
        found: list[Finding] = []
        if record.step != self._step:
            if self._step >= 0:
                found = self._take(self._step, self._print, int(record.ids[rows[0]]))
            self._step, self._print = record.step, 0
        for bits in fingerprints(record.values[rows]).tolist():
            self._print = (self._print * 31 + bits) % 2**53
        return found

    def _take(self, step: int, bits: int, series_id: int) -> list[Finding]:
        known = self._seen.get(bits)
        if known is None:
            odd = self._is_odd()
            self._seen[bits] = [self._place, 1, step]
            self._place, self._in_order, self._last = self._place + 1, 0, -1
            if len(self._seen) > KEPT:
                _, (_, times, _) = self._seen.popitem(last=False)
                self._again -= times > 1
            first = -1
        else:
            self._is_usual |= len(self._seen) < LEAST_FRESH
            self._clean = step - 1 if not self._again else self._clean
            self._again += known[1] == 1
            self._in_order = self._in_order + 1 if known[0] == self._last + 1 else 1
            self._longest, self._last = max(self._longest, self._in_order), known[0]
            known[1] += 1
            odd = known[1] > 2 and self._is_odd()
            first = known[2]
        if not odd:
            return []
        self._begin_anew()
        return [_finding(series_id, step, first, self._clean)]

    def _is_odd(self) -> bool:
        """Whether old batches came that are few among the others, and in their old order."""
        few = 0 < self._again <= LARGEST_SHARE * len(self._seen)
        return few and self._longest >= IN_ORDER and not self._is_usual

    def _begin_anew(self) -> None:
        self._seen.clear()
        self._again = self._in_order = self._longest = 0
        self._last = -1
        self._is_usual = True  # said once: what comes again after it is known

    def saved(self) -> dict[str, Any]:
        """Return the batches as plain data."""
        return {"seen": [[bits, *known] for bits, known in self._seen.items()], "usual": self._is_usual}

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from the batches of an earlier run: those that it is served again are found."""
        rows: Iterable[list[int]] = saved["seen"]
        self._seen = OrderedDict((bits, known) for bits, *known in rows)
        self._is_usual = saved["usual"]
        self._again = sum(known[1] > 1 for known in self._seen.values())
        self._place = max((known[0] for known in self._seen.values()), default=-1) + 1


def _finding(series_id: int, step: int, first: int, clean: int) -> Finding:
    """Return that a batch is that of step `first`, or that a new one follows old ones (-1)."""
    return Finding(
        series_id, -1, DUPLICATE_DATA, NAME, "batch", float(first), float("nan"), SCORE, True, step, clean, False
    )
