"""Where the learning rate changes much: at a restart of its schedule everything may change at once, by right."""

import math
from collections import deque
from typing import Final

from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import LEARNING_RATE, OPTIMIZER_RATE, Series, option_parts
from trainsentry.collectors.statistics import VALUE

RATES: Final = (LEARNING_RATE, OPTIMIZER_RATE)
"""The rate that the training loop logs, and the optimizer's own rate where the loop logs one."""

OPTION_OF_RATE: Final = "lr"
"""The name that torch's optimizers give it in their groups."""

RISE: Final = 1.5
RISING: Final = 8
"""Factor by which a learning rate that has risen is above the least of the last eight steps, or above its sample
before."""


FOLLOWS: Final = 4
"""Steps after one at which a rate had risen in which what the larger updates have done shows."""


class RateChanges:
    """Follows the learning rates that are logged or read; `risen_at` is the last step at which one had risen.

    Groups tell of theirs, among their options, in the step in which it changes.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_rate = arrays.series.column(bool, of=_is_rate)
        self._known: dict[int, deque[tuple[int, float]]] = {}
        self._noted: StepRecord | None = None
        self.risen_at = -1

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
        return 0 <= step - self.risen_at <= FOLLOWS

    def _take(self, known: deque[tuple[int, float]], step: int, value: float) -> None:
        """Take in a rate of a step; it may be sampled seldom, and a run may go back."""
        if known and known[-1][0] > step:
            known.clear()
            self.risen_at = -1 if self.risen_at >= step else self.risen_at
        while len(known) > 1 and known[0][0] <= step - RISING:
            known.popleft()
        if known and value > RISE * min(before for _, before in known):
            self.risen_at = step
        known.append((step, value))


def _is_rate(series: Series) -> bool:
    option = option_parts(series.name) if series.scalar else None
    return series.scalar and (series.name in RATES or (option is not None and option[2] == OPTION_OF_RATE))
