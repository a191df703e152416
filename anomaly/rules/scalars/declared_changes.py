"""Changes that a loop declares: by numbers that it logs, inputs that grow stage by stage, layers that it thaws."""

import math
from typing import Final

from trainsentry.anomaly.rules.data.length_schedule import LengthSchedule
from trainsentry.anomaly.rules.scalars.thawed_layers import ThawedLayers
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Series
from trainsentry.collectors.statistics import VALUE

DECLARED: Final = frozenset(
    {"batch_size", "sequence_length", "accumulation_steps", "world_size", "temperature", "dropout", "stage", "dataset"}
)
"""Logged scalars by which a user declares that training goes on differently."""

STRETCH: Final = 16
"""Steps for which a number must have been the same before its change ends a stretch of the training: one that changes
with each batch, as the length of what is read, declares nothing. It may be logged at its changes alone."""

EXPLICIT: Final = frozenset({"stage", "dataset"})
"""Those that say nothing but that something changes."""

IN_A_ROW: Final = 2
"""Values in a row, each another, from which a number that is none of these varies by itself: a length of what is read,
logged every hundredth step."""


class DeclaredChanges:
    """Follows the declared numbers of a run, the lengths of its inputs, and which parameters have gradients."""

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_declared = arrays.series.column(bool, of=_is_declared)
        self._lengths, self._thawed = LengthSchedule(arrays), arrays.shared(ThawedLayers)
        self._values: dict[int, tuple[float, int]] = {}  # with the step since which each is that
        self._others: dict[int, int] = {}  # values in a row, each another
        self._is_explicit = arrays.series.column(bool, of=lambda s: s.scalar and s.name in EXPLICIT)
        self._noted: StepRecord | None = None
        self._changed = self._ends_stretch = False

    def changes(self, record: StepRecord) -> bool:
        """Return whether a record declares a change; what several rules ask for is taken in once."""
        if record is self._noted:
            return self._changed
        self._noted = record
        self._changed = self._ends_stretch = self._lengths.grows_again(record) | self._thawed.thaws(record)
        for row in rows_where(self._is_declared.values[record.where]).tolist():
            series_id, value = int(record.ids[row]), float(record.values[row, VALUE])
            before, since = self._values.get(series_id, (value, record.step))
            since = min(since, record.step)  # the run may have gone back
            changed = before != value and math.isfinite(value)
            others = self._others[series_id] = self._others.get(series_id, 0) + 1 if changed else 0
            declares = others < IN_A_ROW or bool(self._is_explicit.values[series_id])
            self._changed |= changed
            self._ends_stretch |= changed and declares and record.step - since >= STRETCH
            self._values[series_id] = value, record.step if changed else since
        return self._changed

    def ends_stretch(self, record: StepRecord) -> bool:
        """Return whether a record declares a change of what had been the same for long."""
        self.changes(record)
        return self._ends_stretch


def _is_declared(series: Series) -> bool:
    return series.scalar and series.name in DECLARED
