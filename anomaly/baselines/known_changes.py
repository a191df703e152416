"""What is known to change: factors that are taken out, and changes that the user has declared."""

import math
from typing import Final

import numpy as np

from trainsentry.anomaly.features import Floats
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    LEARNING_RATE,
    OPTIMIZER_RATE,
    UPDATE,
    SeriesTable,
)
from trainsentry.collectors.statistics import INFS, NANS, VALUE

DECLARED: Final = frozenset(
    {"batch_size", "sequence_length", "accumulation_steps", "world_size", "temperature", "dropout", "stage", "dataset"}
)
"""Logged scalars that say that training goes on differently."""

DIVIDES: Final = {LEARNING_RATE: (UPDATE,), "loss_scale": (ACTIVATION_GRAD_INPUT, ACTIVATION_GRAD_OUTPUT)}
"""Scalars that a quantity is proportional to. Gradients of parameters are unscaled when they are read."""

MEANS: Final = {OPTIMIZER_RATE: LEARNING_RATE}
"""What else says the same; the optimizer's own word comes last in a record, and counts."""

SECONDS_MEMORY: Final = 0.05
"""Weight of a step in the average duration of steps."""


class KnownChanges:
    """Follows what the training loop says of itself."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self.divisor = np.zeros(0)
        self.seconds = 1.0
        self._factor = dict.fromkeys(DIVIDES, 1.0)
        self._declared: dict[int, float] = {}
        self._divides = {name: np.zeros(0, bool) for name in DIVIDES}
        self._special = np.zeros(0, bool)
        self._numel = np.zeros(0)
        self._last: tuple[int, float] | None = None

    def judge(self, record: StepRecord) -> bool:
        """Take in what a record says; return whether a change was declared."""
        self._refresh()
        self._time(record)
        changed = False
        for row in np.flatnonzero(self._special[record.where]).tolist():
            series_id = int(record.ids[row])
            name, value = self.table.series[series_id].name, float(record.values[row, VALUE])
            if MEANS.get(name, name) in DIVIDES:
                if math.isfinite(value) and value > 0:
                    self._factor[MEANS.get(name, name)] = value
                continue
            before = self._declared.get(series_id)
            changed |= before is not None and before != value and math.isfinite(value)
            self._declared[series_id] = value
        return changed

    def divisors(self, record: StepRecord) -> Floats:
        """Return the known factor in the sizes of each row."""
        self.divisor = np.ones(len(record))
        for name, mask in self._divides.items():
            self.divisor[mask[record.where]] = self._factor[name]
        return self.divisor

    def numel(self, record: StepRecord) -> Floats:
        """Return the number of elements of each row."""
        found: Floats = np.asarray(self._numel[record.layouts])
        return found

    @staticmethod
    def finite_columns(record: StepRecord) -> Floats:
        """Return the statistics, shape (COLUMNS, n); those of rows that are not finite are left out."""
        columns: Floats = record.columns
        bad = (columns[NANS] > 0) | (columns[INFS] > 0)
        if bad.any():
            columns = columns.copy()
            columns[:, bad] = np.nan
        return columns

    def _time(self, record: StepRecord) -> None:
        if self._last is not None and record.step == self._last[0] + 1 and record.time > self._last[1] > 0:
            self.seconds += SECONDS_MEMORY * (record.time - self._last[1] - self.seconds)
        if self._last is None or record.step != self._last[0]:
            self._last = (record.step, record.time)

    def _refresh(self) -> None:
        new = self.table.series[len(self._special) :]
        if new:
            special = [s.scalar and s.name in DECLARED | DIVIDES.keys() | MEANS.keys() for s in new]
            self._special = np.append(self._special, special)
            for name, quantities in DIVIDES.items():
                self._divides[name] = np.append(self._divides[name], [s.quantity in quantities for s in new])
        layouts = self.table.layouts[len(self._numel) :]
        if layouts:
            self._numel = np.append(self._numel, [float(x.numel) for x in layouts])
