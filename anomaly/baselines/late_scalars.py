"""Scalars that arrive a step late: a loop that logs its loss after the update reports the step that has just ended."""

import numpy as np

from trainsentry.anomaly.series_arrays import Mask, SeriesArrays, rows_where
from trainsentry.anomaly.series_facts import SeriesFacts
from trainsentry.collectors.record import StepRecord


class LateScalars:
    """Learns it from steps with activations: a loss ahead of the forward pass cannot be its result.

    Only the loss and the gradients' norm are results of a step; a learning rate may well be logged as a step begins.
    `order` is the execution order of a late scalar in the step before: after the forward pass, before the backward
    pass.
    """

    def __init__(self, facts: SeriesFacts, arrays: SeriesArrays) -> None:
        self.facts = facts
        self.order = 0
        self._late = arrays.series.column(bool)
        self._step = -1
        self._backward_begins = 0
        self._follows = self._skipped = self._skipped_before = False

    def note(self, record: StepRecord) -> None:
        """Take in a record, which may be a part of a step."""
        if record.step != self._step:
            self._follows = record.step == self._step + 1
            self.order = self._backward_begins if self._follows else 0
            self._skipped_before, self._skipped = self._skipped and self._follows, False
            self._step, self._backward_begins = record.step, 0
        self._skipped |= record.skipped
        where = record.where
        activations = rows_where(self.facts.activation[where] & ~self.facts.backward[where])
        if len(activations):
            if record.first_order == 0:
                scalars = rows_where(self.facts.scalar[where] & self.facts.watched[where])
                self._late.values[record.ids[scalars]] = scalars < activations[0]
            self._backward_begins = record.first_order + int(activations[-1])  # a tie goes to what came first

    def is_late(self, series_id: int) -> bool:
        """Whether the row of a series belongs to the step before."""
        late = self._late.values
        return self._follows and 0 <= series_id < len(late) and bool(late[series_id])

    def excused(self, record: StepRecord) -> Mask:
        """Return the rows of the backward pass of a step that the loss scaler skipped: its normal work."""
        if not (record.skipped or self._skipped_before):
            return np.zeros(len(record), bool)
        late = self._late.values[record.where] & self._follows
        found: Mask = self.facts.backward[record.where] & np.where(late, self._skipped_before, record.skipped)
        return found
