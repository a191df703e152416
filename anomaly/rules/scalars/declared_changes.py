"""Changes that a training loop declares by the numbers that it logs: another batch size, sequence length or stage."""

import math
from typing import Final

from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Series
from trainsentry.collectors.statistics import VALUE

DECLARED: Final = frozenset(
    {"batch_size", "sequence_length", "accumulation_steps", "world_size", "temperature", "dropout", "stage", "dataset"}
)
"""Logged scalars by which a user declares that training goes on differently."""


class DeclaredChanges:
    """Follows the declared numbers of a run."""

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_declared = arrays.series.column(bool, of=_is_declared)
        self._values: dict[int, float] = {}
        self._noted: StepRecord | None = None
        self._changed = False

    def changes(self, record: StepRecord) -> bool:
        """Return whether a record declares a change; what several rules ask for is taken in once."""
        if record is self._noted:
            return self._changed
        self._noted, self._changed = record, False
        for row in rows_where(self._is_declared.values[record.where]).tolist():
            series_id, value = int(record.ids[row]), float(record.values[row, VALUE])
            before = self._values.get(series_id)
            self._changed |= before is not None and before != value and math.isfinite(value)
            self._values[series_id] = value
        return self._changed


def _is_declared(series: Series) -> bool:
    return series.scalar and series.name in DECLARED
