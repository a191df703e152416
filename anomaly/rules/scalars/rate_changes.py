"""Where the learning rate changes much: at a restart of its schedule everything may change at once, by right."""

import math
from collections import deque
from typing import Final

from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import LEARNING_RATE, OPTIMIZER_RATE
from trainsentry.collectors.statistics import VALUE

RATES: Final = (LEARNING_RATE, OPTIMIZER_RATE)
"""The rate that the training loop logs, and the optimizer's own rate where the loop logs one."""

RISE: Final = 1.5
RISING: Final = 8
"""Factor by which a learning rate that has risen is above the least of the last eight steps, or above its sample
before."""

FALL: Final = 2.0
"""Factor by which a rate that has fallen is below its sample before: more updates may be lost in rounding then."""


class RateChanges:
    """Follows the learning rates that are logged or read; one had risen or fallen last at `risen_at` or `fallen_at`."""

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_rate = arrays.series.column(bool, of=lambda s: s.scalar and s.name in RATES)
        self._known: dict[int, deque[tuple[int, float]]] = {}
        self._noted: StepRecord | None = None
        self.risen_at = self.fallen_at = -1

    def note(self, record: StepRecord) -> None:
        """Take in a record; what several rules ask for is taken in once."""
        if record is self._noted:
            return
        self._noted = record
        for row in rows_where(self._is_rate.values[record.where]).tolist():
            value = float(record.values[row, VALUE])
            if 0 < value < math.inf:
                self._take(self._known.setdefault(int(record.ids[row]), deque()), record.step, value)

    def rose_lately(self, step: int) -> bool:
        """Whether a rate has risen in the last steps up to this one."""
        return 0 <= step - self.risen_at <= RISING

    def _take(self, known: deque[tuple[int, float]], step: int, value: float) -> None:
        """Take in a rate of a step; it may be sampled seldom, and a run may go back."""
        if known and known[-1][0] > step:
            known.clear()
        while len(known) > 1 and known[0][0] <= step - RISING:
            known.popleft()
        if known and value > RISE * min(before for _, before in known):
            self.risen_at = step
        if known and value * FALL <= known[-1][1]:
            self.fallen_at = step
        known.append((step, value))
