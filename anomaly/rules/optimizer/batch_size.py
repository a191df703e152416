"""The size of the model's batch, by which programs scale the learning rate."""

import math
from typing import Final

import numpy as np

from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Series
from trainsentry.collectors.shared.batch_rows import PART

STEPS_AFTER: Final = 2
"""Steps after a larger batch in which the rate may still follow: some loops set it when the batch has been used."""

SLACK: Final = math.log(1.1)
"""Share by which the rate may rise further than the batch grew: schedules go on meanwhile, and the last sequences of a
batch are cut."""


def _is_whole_input(series: Series) -> bool:
    return series.is_model_input and not series.name.endswith(f".{PART}")


class BatchSize:
    """Counts the elements of all inputs of a step, over its micro-steps, and remembers the largest step.

    The rate grows with the batch (Goyal et al., "Accurate, Large Minibatch SGD", 2017), or with its root. Of a large
    input only a part is read at every step, so that its size is not known between two samples.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_input = arrays.series.column(bool, of=_is_whole_input)
        self._step, self._elements, self._largest = -1, 0.0, 0.0
        self._grew, self._growth = -1, 1.0
        self._pass = arrays.series.column(np.int64, -1, of=lambda s: s.micro_step if s.is_model_input else -1)
        self._passes, self._more_passes_at = 0, -1

    def note(self, observed: Observed) -> None:
        """Take in the inputs of a record; a step may come in several."""
        self._note_passes(observed.record)
        rows = rows_where(self._is_input.values[observed.record.where])
        if not len(rows):
            return
        step = observed.record.step
        if step != self._step:
            self._largest = max(self._largest, self._elements)
            self._step, self._elements = step, 0.0
        self._elements += float(observed.numel[rows].sum())
        if self._elements > self._largest > 0:
            self._grew, self._growth = step, self._elements / self._largest

    def _note_passes(self, record: StepRecord) -> None:
        """Note whether a step has more micro-steps than the one before; their inputs come in its record."""
        passes = int(self._pass.values[record.where].max(initial=-1)) + 1
        if passes:
            if 0 < self._passes < passes or record.step < self._more_passes_at:  # or the run has gone back
                self._more_passes_at = record.step
            self._passes = passes

    def has_more_passes_since(self, step: int) -> bool:
        """Whether a step since then had more micro-steps than the one before: a rate is often set at each of them."""
        return self._more_passes_at >= step

    def explains(self, before: float, after: float, step: int) -> bool:
        """Whether a rate that rises at `step` follows a batch that has just become larger than all before it."""
        if not (0 <= step - self._grew <= STEPS_AFTER and 0 < before < after):
            return False
        return math.log(after / before) <= math.log(self._growth) + SLACK
