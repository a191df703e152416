"""A batch whose elements are all equal: images that were not decoded, nothing but padding, one repeated token."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import DEAD, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_INPUT
from trainsentry.collectors.statistics import INFS, MAX, MIN, NANS, ZEROS

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, below the rules that are certain of a value by itself."""

VARIED_BEFORE: Final = 16
"""Samples in which the input must have varied before: some inputs are constant by design."""

CONSTANT_BY_DESIGN: Final = -1
"""Stands in place of the number of varied samples once an input was constant; it is not judged again."""

LEAST_ELEMENTS: Final = 256
"""Elements below which an input may be constant by chance: the lengths of a batch, its noise levels."""

MOSTLY_ZERO: Final = 0.5
"""Share of zeros above which an input may be all zero once in a while."""


class ConstantDataRule(Rule):
    """Looks at the first tensor that enters the model, and reports each series at most once.

    Masks and positions come after it. An input that only ever was 0 and 1 is a mask all the same and may be all ones;
    an input that was mostly zero may be all zero.
    """

    name: ClassVar[str] = "constant_data"
    quantities: ClassVar[frozenset[str]] = frozenset({ACTIVATION_INPUT})
    statistics: ClassVar[frozenset[str]] = frozenset({"min", "max", "zeros", "nans", "infs"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_data = arrays.series.column(bool, of=lambda s: s.is_model_input)
        self._varied = arrays.series.column(np.int64)
        self._beyond_mask = arrays.series.column(bool)
        self._mostly_zero = arrays.series.column(bool)
        self._step = -1

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the input that is constant for the first time."""
        record = observed.record
        rows = rows_where(self._is_data.values[record.where])
        if not len(rows) or record.step == self._step:
            return []
        self._step = record.step
        row, series_id = int(rows[0]), int(record.ids[rows[0]])
        low, high, zeros = record.values[row, [MIN, MAX, ZEROS]].tolist()
        if observed.numel[row] < LEAST_ELEMENTS or record.values[row, [NANS, INFS]].any():
            return []
        varied, beyond_mask, mostly_zero = self._varied.values, self._beyond_mask.values, self._mostly_zero.values
        if low != high:
            varied[series_id] += varied[series_id] >= 0
            beyond_mask[series_id] |= (low, high) != (0.0, 1.0)
            mostly_zero[series_id] |= zeros > MOSTLY_ZERO
            return []
        samples, varied[series_id] = int(varied[series_id]), CONSTANT_BY_DESIGN
        if samples < VARIED_BEFORE or not beyond_mask[series_id] or (high == 0 and mostly_zero[series_id]):
            return []
        return [Finding(series_id, row, DEAD, self.name, "max", high, float("nan"), SCORE)]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the value that all elements have."""
        return f"every element of {subject} is {anomaly.value:.6g} at step {anomaly.step}; they differed before"
