"""The overflow verdict of a step: whether anything left the finite range."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.rules.nonfinite import NonfiniteRule
from trainsentry.anomaly.series_facts import Mask, SeriesFacts
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable


@dataclass(frozen=True)
class Overflow:
    """An overflow of one step: positions of the overflowing rows in the record it was found in."""

    step: int
    skipped: bool
    rows: npt.NDArray[np.intp]


class OverflowRule:
    """Judges the tensors a step produced; inputs that were handed in and logged scalars do not count.

    `not_finite` masks every row of the record judged last that is not finite, those included.

    Keeps `count`, the steps with an overflow, and `skipped`, those among the steps that the loss scaler
    skipped: for a scaler, overflowing now and then is normal work, so they are counted apart.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.facts = SeriesFacts(table)
        self.count = 0
        self.skipped = 0
        self._rule = NonfiniteRule(self.facts)
        self._last_step = -1
        self.not_finite: Mask = np.zeros(0, bool)

    def go_back(self) -> None:
        """Forget which step was counted last: the steps begin anew."""
        self._last_step = -1

    def judge(self, record: StepRecord) -> Overflow | None:
        """Return the overflow in a record or None; a step that comes in several parts counts once."""
        bad = self.not_finite = self._rule.rows(record)  # also brings the facts up to date
        if not bad.any():
            return None
        rows = np.flatnonzero(bad & self.facts.judged[record.where] & ~self.facts.scalar[record.where])
        if not len(rows):
            return None
        if record.step != self._last_step:
            self._last_step = record.step
            self.skipped += record.skipped
            self.count += not record.skipped
        return Overflow(record.step, record.skipped, rows)
