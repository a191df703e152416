"""The overflow verdict of a step: whether any of its tensors left the finite range."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.rules.dtype_edge import LARGEST, magnitudes
from trainsentry.anomaly.rules.nonfinite import NonfiniteRule
from trainsentry.anomaly.series_arrays import Mask, SeriesArrays, rows_where
from trainsentry.anomaly.series_facts import SeriesFacts
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import OVERFLOW_FLAG, SeriesTable
from trainsentry.collectors.statistics import INFS, NANS, VALUE


@dataclass(frozen=True)
class Overflow:
    """An overflow of one step: positions of the overflowing rows in their record."""

    step: int
    skipped: bool
    rows: npt.NDArray[np.intp]


class OverflowRule:
    """Judges the tensors that a step computed; inputs of modules and logged scalars do not count.

    `not_finite` masks every row of the last record that is not finite, inputs and scalars included. On a device that
    saturates, which `saturates` says at the first record, a value at the end of its dtype's range is an overflow too,
    and so is the device's flag.

    In nearly all steps nothing is wrong, and the ids are the same array as in the step before, of which all is known:
    one look at the counts of NaN and Inf is enough then.

    `count` counts the steps with an overflow, `skipped` those that the loss scaler skipped: an overflow now and then
    is a scaler's normal work, so they are counted apart.
    """

    def __init__(self, table: SeriesTable, saturates: Callable[[], bool] = lambda: False) -> None:
        self.arrays = SeriesArrays(table)
        self.facts = SeriesFacts(self.arrays)
        self.count = 0
        self.skipped = 0
        self._rule = NonfiniteRule(self.arrays)
        self._saturates = saturates
        self._saturated: _SaturatedRows | None = None
        self._asked = False
        self._is_flag = self.arrays.series.column(bool, of=lambda s: s.scalar and s.quantity == OVERFLOW_FLAG)
        self._last_step = -1
        self._usual: npt.NDArray[np.int32] | None = None
        self.not_finite: Mask = np.zeros(0, bool)

    def go_back(self) -> None:
        """Forget the step that was counted last: the run goes back to an earlier one."""
        self._last_step = -1

    def judge(self, record: StepRecord) -> Overflow | None:
        """Return the overflow in a record or None; a step that comes in several parts counts once."""
        self.arrays.grow()
        if record.ids is self._usual and not record.values[:, NANS : INFS + 1].any():
            self.not_finite = np.zeros(len(record), bool)
            return None
        bad = self.not_finite = self._rule.rows(record, self.facts)
        if not self._asked:  # not before: the model may be moved to its device after `watch`
            self._asked = True
            self._saturated = _SaturatedRows(self.arrays) if self._saturates() else None
        if self._saturated is not None:
            bad = bad | self._saturated.rows(record, self.facts)
        if not bad.any() and not self._is_flag.values[record.where].any():
            self._usual = record.ids if self._saturated is None and not record.ids.flags.writeable else None
            return None
        tensors = bad & self.facts.judged[record.where] & ~self.facts.scalar[record.where]
        rows = rows_where(tensors | self._flagged(record))
        if not len(rows):
            return None
        if record.step != self._last_step:
            self._last_step = record.step
            self.skipped += record.skipped
            self.count += not record.skipped
        return Overflow(record.step, record.skipped, rows)

    def _flagged(self, record: StepRecord) -> Mask:
        """Return which rows are a device's overflow flag that is set, shape (n,)."""
        flagged: Mask = self._is_flag.values[record.where] & (record.columns[VALUE] > 0)
        return flagged


class _SaturatedRows:
    """Finds rows that hold the largest finite value of their dtype, where a device stores it instead of Inf.

    An activation that holds it at its first sample (a mask) does so by design.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._largest = arrays.layouts.column(np.float64, of=lambda layout: LARGEST.get(layout.dtype, np.inf))
        self._seen = arrays.series.column(bool)
        self._by_design = arrays.series.column(bool)

    def rows(self, record: StepRecord, facts: SeriesFacts) -> Mask:
        """Return which rows are saturated although they should not be, shape (n,)."""
        where = record.where
        found: Mask = magnitudes(record) >= self._largest.values[record.layouts]
        first = ~self._seen.values[where]
        self._by_design.values[record.ids[first & found & facts.may_mask[where]]] = True
        self._seen.values[where] = True
        found &= ~self._by_design.values[where]
        return found
