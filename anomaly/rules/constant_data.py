"""A batch whose elements are all the same: pictures that were not decoded, padding alone, one token over and over."""

from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import DEAD
from trainsentry.anomaly.features import Floats
from trainsentry.anomaly.finding import Finding
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_INPUT, SeriesTable
from trainsentry.collectors.statistics import INFS, MAX, MIN, NANS, ZEROS

NAME: Final = "constant_data"
SCORE: Final = 60.0

VARIED: Final = 16
"""Samples that must have varied before one that does not counts: some inputs are constant by design."""

NEVER_AGAIN: Final = -1
"""In the place of that number, once an input was constant: then it may be."""

LEAST: Final = 256
"""Elements below which an input may well be constant for once: the lengths of a batch, its noise levels."""


class ConstantDataRule:
    """Looks at the first thing that goes into the model, once a series.

    Masks and positions come behind it. What was only ever 0 and 1 is a mask all the same, which may be all ones, and
    what was zero for the most part may be zero for once.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._is_data = np.zeros(0, bool)
        self._varied = np.zeros(0, np.int64)
        self._beyond_mask = np.zeros(0, bool)
        self._mostly_zero = np.zeros(0, bool)
        self._step = -1

    def judge(self, record: StepRecord, numel: Floats) -> list[Finding]:
        """Return the input that is constant and never was before; `numel` counts the elements of each row."""
        self._refresh()
        rows = np.flatnonzero(self._is_data[record.where])
        if not len(rows) or record.step == self._step:
            return []
        self._step = record.step
        row, series_id = int(rows[0]), int(record.ids[rows[0]])
        low, high, zeros = record.values[row, [MIN, MAX, ZEROS]].tolist()
        if numel[row] < LEAST or record.values[row, [NANS, INFS]].any():
            return []
        if low != high:
            self._varied[series_id] += self._varied[series_id] >= 0
            self._beyond_mask[series_id] |= (low, high) != (0.0, 1.0)
            self._mostly_zero[series_id] |= zeros > 0.5
            return []
        varied, self._varied[series_id] = int(self._varied[series_id]), NEVER_AGAIN
        if varied < VARIED or not self._beyond_mask[series_id] or (high == 0 and self._mostly_zero[series_id]):
            return []
        return [Finding(series_id, row, DEAD, NAME, "max", high, float("nan"), SCORE)]

    def _refresh(self) -> None:
        new = self.table.series[len(self._is_data) :]
        if new:
            self._is_data = np.append(self._is_data, [s.quantity == ACTIVATION_INPUT and s.module == "" for s in new])
            self._varied = np.append(self._varied, np.zeros(len(new), np.int64))
            self._beyond_mask = np.append(self._beyond_mask, np.zeros(len(new), bool))
            self._mostly_zero = np.append(self._mostly_zero, np.zeros(len(new), bool))
