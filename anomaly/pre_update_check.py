"""The check of a step in the training process, before its update: only rules that need no history."""

from collections.abc import Callable
from typing import Final

from trainsentry.anomaly.overflow import OverflowRule
from trainsentry.anomaly.rules.dtype_edge import DtypeEdgeRule
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable

SKIPS_TO_LOOK: Final = 3
"""Skipped steps in a row after which the weights are examined: a scale that is too large skips one or two."""


class PreUpdateCheck:
    """Decides whether a step is examined before its update, and counts its overflow."""

    def __init__(self, table: SeriesTable, saturates: Callable[[], bool] = lambda: False) -> None:
        self.overflow = OverflowRule(table, saturates)
        self._edge = DtypeEdgeRule(self.overflow.arrays)
        self._skips_in_a_row = 0

    def is_wrong(self, record: StepRecord) -> bool:
        """Whether a row is not finite or at the edge of its dtype although it should not be.

        Bad gradients in a skipped step are the loss scaler's normal work; after a few skipped steps in a row the
        weights are examined.
        """
        self.overflow.judge(record)
        facts = self.overflow.facts
        ids = record.where
        wrong = self._edge.rows(record, facts) | (self.overflow.not_finite & facts.watched[ids])
        wrong &= facts.judged[ids]
        if not record.skipped:
            self._skips_in_a_row = 0
            return bool(wrong.any())
        self._skips_in_a_row += 1
        return bool((wrong & ~facts.backward[ids]).any()) or self._skips_in_a_row == SKIPS_TO_LOOK
