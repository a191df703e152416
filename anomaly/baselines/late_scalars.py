"""Whether the loss comes a step late: a loop that logs behind the update tells of the step that has just ended."""

import numpy as np

from trainsentry.anomaly.series_facts import Mask, SeriesFacts
from trainsentry.collectors.record import StepRecord


class LateScalars:
    """Learns it from steps with activations: what stands before the forward pass cannot come of it.

    Only the loss and the gradients' norm are made by a step; a learning rate may well be logged as a step begins.
    `order` is where in the step before it belongs: behind the forward pass, before the backward pass.
    """

    def __init__(self, facts: SeriesFacts) -> None:
        self.facts = facts
        self.order = 0
        self._late: Mask = np.zeros(0, bool)
        self._step = -1
        self._backward_begins = 0
        self._follows = self._skipped = self._skipped_before = False

    def note(self, record: StepRecord) -> None:
        """Take a record, or a part of one."""
        self._late = np.append(self._late, np.zeros(len(self.facts.scalar) - len(self._late), bool))
        if record.step != self._step:
            self._follows = record.step == self._step + 1
            self.order = self._backward_begins if self._follows else 0
            self._skipped_before, self._skipped = self._skipped and self._follows, False
            self._step, self._backward_begins = record.step, 0
        self._skipped |= record.skipped
        where = record.where
        activations = np.flatnonzero(self.facts.activation[where] & ~self.facts.backward[where])
        if len(activations):
            if record.first_order == 0:
                scalars = np.flatnonzero(self.facts.scalar[where] & self.facts.watched[where])
                self._late[record.ids[scalars]] = scalars < activations[0]
            self._backward_begins = record.first_order + int(activations[-1]) + 1

    def is_late(self, series_id: int) -> bool:
        """Whether what is there of a series belongs to the step before."""
        return self._follows and 0 <= series_id < len(self._late) and bool(self._late[series_id])

    def excused(self, record: StepRecord) -> Mask:
        """Return the rows that the backward pass of a step made that the loss scaler has skipped: its normal work."""
        if not (record.skipped or self._skipped_before):
            return np.zeros(len(record), bool)
        late = self._late[record.where] & self._follows
        found: Mask = self.facts.backward[record.where] & np.where(late, self._skipped_before, record.skipped)
        return found
