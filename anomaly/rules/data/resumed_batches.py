"""Batches that come again after a resume: the data loader began anew instead of going on."""

from collections import deque
from typing import Any, Final

from trainsentry.anomaly.anomaly import DUPLICATE_DATA
from trainsentry.anomaly.finding import Finding

SCORE: Final = 20.0
"""Deviations: below the rules whose bounds hold for any run, as an epoch in order may end where a run is saved."""

FIRST: Final = 256
NEWEST: Final = 2048
"""Batches of the run that a checkpoint remembers, its first and its newest, at some 25 bytes each: a loader begins anew
at the run's first batch, or at one that it had served shortly before the checkpoint."""

LEAST_DIFFERENT: Final = 50
"""Different batches before the checkpoint: some runs train on a few batches again and again by design."""

LARGEST_SHARE: Final = 0.1
"""Share of the remembered batches that may have come before: above it the run repeats data by design."""

IN_ORDER: Final = 3
"""Old batches that must come first after the resume, one after the other as they did before: random draws do not."""

RESUMED: Final = "resumed"


class ResumedBatches:
    """Remembers a run's batches, also across a checkpoint, and judges the first ones after a resume.

    Batches are numbers made from the bits of the model's inputs, with their steps.
    """

    def __init__(self) -> None:
        self._first: list[tuple[int, int]] = []
        self._newest: deque[tuple[int, int]] = deque(maxlen=NEWEST)
        self._old: dict[int, tuple[int, int]] = {}  # until the first new batch: of each old one, its place and step
        self._came: list[tuple[int, int, int]] = []  # since the resume: place and step of the old batch, step now

    def take(self, step: int, bits: int, series_id: int, detector: str) -> list[Finding]:
        """Note the batch of a step; return a finding where it is the third old one in a row after a resume."""
        self._note(step, bits)
        if not self._old:
            return []
        place, before = self._old.get(bits, (-1, -1))
        if place < 0 or (self._came and place != self._came[-1][0] + 1):
            self._old = {}
            return []
        self._came.append((place, before, step))
        if len(self._came) < IN_ORDER:
            return []
        self._old = {}
        _, first, now = self._came[0]
        detail = (DUPLICATE_DATA, detector, RESUMED, float(first), float("nan"))
        return [Finding(series_id, -1, *detail, SCORE, step=now, last_clean=now - 1, passed_on=False)]

    def _note(self, step: int, bits: int) -> None:
        if len(self._first) < FIRST:
            self._first.append((step, bits))
        else:
            self._newest.append((step, bits))

    def saved(self, step: int, bits: int) -> list[list[int]]:
        """Return the remembered batches in their order, with that of the newest step, as plain data."""
        newest = [(step, bits)] if step >= 0 else []
        return [list(batch) for batch in [*self._first, *self._newest, *newest]]

    def load(self, saved: Any) -> None:
        """Go on from the batches that a checkpoint remembers."""
        batches = [(int(step), int(bits)) for step, bits in saved]
        self._first, self._newest = batches[:FIRST], deque(batches[FIRST:], maxlen=NEWEST)
        self._old, self._came = {}, []
        for place, (step, bits) in enumerate(batches):
            self._old.setdefault(bits, (place, step))
        repeats = bool(batches) and self._old[batches[-1][1]][0] < len(batches) - 1  # an epoch in order has begun again
        if repeats or len(self._old) < max(LEAST_DIFFERENT, (1 - LARGEST_SHARE) * len(batches)):
            self._old = {}
