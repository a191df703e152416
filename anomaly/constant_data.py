"""A batch whose elements are all the same: pictures that were not decoded, padding alone, one token over and over."""

from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import DEAD
from trainsentry.anomaly.features import Floats
from trainsentry.anomaly.finding import Finding
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_INPUT, SeriesTable
from trainsentry.collectors.statistics import INFS, MAX, MIN, NANS

NAME: Final = "constant_data"
SCORE: Final = 60.0

VARIED: Final = 16
"""Samples that must have varied before one that does not counts: some inputs are constant by design."""

LEAST: Final = 256
"""Elements below which an input may well be constant for once: the lengths of a batch, its noise levels."""


class ConstantDataRule:
    """Looks at what goes into the model. What was only ever 0 and 1 is a mask, which may be all ones."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._is_data = np.zeros(0, bool)
        self._varied = np.zeros(0, np.int64)
        self._beyond_mask = np.zeros(0, bool)

    def judge(self, record: StepRecord, numel: Floats) -> list[Finding]:
        """Return inputs that are constant and never were before; `numel` counts the elements of each row."""
        self._refresh()
        rows = np.flatnonzero(self._is_data[record.where] & (numel >= LEAST))
        rows = rows[(record.values[rows, NANS] == 0) & (record.values[rows, INFS] == 0)]
        ids, low, high = record.ids[rows], record.values[rows, MIN], record.values[rows, MAX]
        constant = low == high
        odd = constant & (self._varied[ids] >= VARIED) & self._beyond_mask[ids]
        self._varied[ids] = np.where(constant, 0, self._varied[ids] + 1)
        self._beyond_mask[ids] |= ~constant & ((low != 0) | (high != 1))
        return [
            Finding(int(ids[at]), int(rows[at]), DEAD, NAME, "max", float(high[at]), float("nan"), SCORE)
            for at in np.flatnonzero(odd).tolist()
        ]

    def _refresh(self) -> None:
        new = self.table.series[len(self._is_data) :]
        if new:
            self._is_data = np.append(self._is_data, [s.quantity == ACTIVATION_INPUT and s.module == "" for s in new])
            self._varied = np.append(self._varied, np.zeros(len(new), np.int64))
            self._beyond_mask = np.append(self._beyond_mask, np.zeros(len(new), bool))
