"""What the training process itself sees in a step before its update: only what needs no history."""

from typing import Final

from trainsentry.anomaly.overflow import OverflowRule
from trainsentry.anomaly.rules.dtype_edge import DtypeEdgeRule
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable

SKIPS_TO_LOOK: Final = 3
"""Skipped steps in a row after which the weights are looked at: a scale that is too large needs one or two."""


class PreUpdateCheck:
    """Says whether a step has to be examined before its update, and counts its overflow."""

    def __init__(self, table: SeriesTable) -> None:
        self.overflow = OverflowRule(table)
        self._edge = DtypeEdgeRule(self.overflow.facts)
        self._skips_in_a_row = 0

    def is_wrong(self, record: StepRecord) -> bool:
        """Whether something is not finite or at the edge of its dtype that ought not to be.

        What the backward pass made in a skipped step is the scaler's normal work; but when it has skipped a few
        steps in a row, it is time to look at the weights.
        """
        self.overflow.judge(record)
        facts = self.overflow.facts
        ids = record.where
        wrong = self._edge.rows(record)[0] | (self.overflow.not_finite & facts.watched[ids])
        wrong &= facts.judged[ids]
        if not record.skipped:
            self._skips_in_a_row = 0
            return bool(wrong.any())
        self._skips_in_a_row += 1
        return bool((wrong & ~facts.backward[ids]).any()) or self._skips_in_a_row == SKIPS_TO_LOOK
