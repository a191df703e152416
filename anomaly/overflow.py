"""The overflow verdict of a step: whether any of its tensors left the finite range."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.rules.nonfinite import NonfiniteRule
from trainsentry.anomaly.series_arrays import Mask, SeriesArrays
from trainsentry.anomaly.series_facts import SeriesFacts
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable


@dataclass(frozen=True)
class Overflow:
    """An overflow of one step: positions of the overflowing rows in their record."""

    step: int
    skipped: bool
    rows: npt.NDArray[np.intp]


class OverflowRule:
    """Judges the tensors that a step computed; inputs of modules and logged scalars do not count.

    `not_finite` masks every row of the last record that is not finite, inputs and scalars included.

    `count` counts the steps with an overflow, `skipped` those that the loss scaler skipped: an overflow now and then
    is a scaler's normal work, so they are counted apart.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.arrays = SeriesArrays(table)
        self.facts = SeriesFacts(self.arrays)
        self.count = 0
        self.skipped = 0
        self._rule = NonfiniteRule(self.arrays)
        self._last_step = -1
        self.not_finite: Mask = np.zeros(0, bool)

    def go_back(self) -> None:
        """Forget the step that was counted last: the run goes back to an earlier one."""
        self._last_step = -1

    def judge(self, record: StepRecord) -> Overflow | None:
        """Return the overflow in a record or None; a step that comes in several parts counts once."""
        self.arrays.grow()
        bad = self.not_finite = self._rule.rows(record, self.facts)
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
