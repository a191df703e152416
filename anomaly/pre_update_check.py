"""The check of a step in the training process, before its update: what needs no history, and what is far out."""

import math
from collections.abc import Callable
from enum import Enum
from typing import Final

import numpy as np

from trainsentry.anomaly.overflow import OverflowRule
from trainsentry.anomaly.rules.dtype_edge import DtypeEdgeRule
from trainsentry.anomaly.rules.scalars.loss_above_start import LossLevels, is_loss
from trainsentry.anomaly.series_arrays import Mask
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import NORM, VALUE

SKIPS_TO_LOOK: Final = 3
"""Skipped steps in a row after which the weights are examined: a scale that is too large skips one or two."""

FAR_OUT: Final = 100.0
"""Times the largest norm that a series has had. In the clean runs of `benchmarks/detection` (seed 43, 200 steps) no
series that is followed grows more than tenfold within one step once it has been read ten times."""

LEARNED: Final = 10
"""Samples of a series before it can be far out: layers that begin at zero, and warm-up, grow by more at first."""


class Suspected(Enum):
    """Why a step is examined before its update."""

    CERTAIN = "a value that is not finite, or at the edge of its dtype"
    FAR_OUT = "a norm far beyond any that its series has had, or a loss above that at the start"


class PreUpdateCheck:
    """Decides whether a step is examined before its update, and counts its overflow."""

    def __init__(self, table: SeriesTable, saturates: Callable[[], bool] = lambda: False) -> None:
        self.overflow = OverflowRule(table, saturates)
        self._edge = DtypeEdgeRule(self.overflow.arrays)
        self._largest = self.overflow.arrays.series.column(float)
        self._samples = self.overflow.arrays.series.column(np.int32)
        self._step_of = self.overflow.arrays.series.column(np.int64, -1)
        self._followed = self.overflow.arrays.series.column(bool, of=lambda s: not s.is_state)
        self._skips_in_a_row = 0
        self._is_loss = self.overflow.arrays.series.column(bool, of=is_loss)
        self._losses = LossLevels()
        self._lost_all: tuple[int, bool] | None = None

    def suspect(self, record: StepRecord) -> Suspected | None:
        """Return why a step must be examined, None where nothing is suspected.

        Bad gradients in a skipped step are the loss scaler's normal work; after a few skipped steps in a row the
        weights are examined.
        """
        self.overflow.judge(record)
        far_out = bool(self._far_out(record).any()) | self._has_lost_all(record)
        return Suspected.CERTAIN if self._is_certain(record) else Suspected.FAR_OUT if far_out else None

    def _is_certain(self, record: StepRecord) -> bool:
        facts = self.overflow.facts
        ids = record.where
        wrong = self._edge.rows(record, facts) | (self.overflow.not_finite & facts.watched[ids])
        wrong &= facts.judged[ids]
        if not record.skipped:
            self._skips_in_a_row = 0
            return bool(wrong.any())
        self._skips_in_a_row += 1
        return bool((wrong & ~facts.backward[ids]).any()) or self._skips_in_a_row == SKIPS_TO_LOOK

    def _has_lost_all(self, record: StepRecord) -> bool:
        """Whether a loss is above those at the start, as `LossAboveStartRule` will say.

        A step with several optimizers is looked at before each update: its loss is taken once.
        """
        if self._lost_all is not None and self._lost_all[0] == record.step:
            return self._lost_all[1]
        losses = record.values[self._is_loss.values[record.where], VALUE].tolist()
        above = [self._losses.take(loss) for loss in losses if math.isfinite(loss)]
        self._lost_all = (record.step, any(above)) if above else None
        return any(above)

    def _far_out(self, record: StepRecord) -> Mask:
        """Return which rows are far out, shape (n,), and learn the others; a skipped step's gradients are scaled.

        Optimizer state is left out: it follows from the gradients, and what is squared grows twice as fast.
        """
        facts, ids = self.overflow.facts, record.where
        norms, largest, samples = record.columns[NORM], self._largest.values, self._samples.values
        usual = ~self.overflow.not_finite & np.isfinite(norms)
        if record.skipped:
            usual = usual & ~facts.backward[ids]
        known = (samples[ids] >= LEARNED) & (largest[ids] > 0)
        far: Mask = usual & known & (norms > FAR_OUT * largest[ids])
        learned = np.where(usual & ~far, norms, 0.0)
        largest[ids] = np.maximum(largest[ids], learned)
        samples[ids] += usual & (self._step_of.values[ids] != record.step)  # a step may have several updates
        self._step_of.values[ids] = record.step
        far &= facts.judged[ids] & facts.watched[ids] & self._followed.values[ids]
        return far
