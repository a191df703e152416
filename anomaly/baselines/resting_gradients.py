"""Gradients that are zero as a whole for a moment: a head without examples in a batch, an expert without tokens."""

from typing import Final

import numpy as np

from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Mask, SeriesArrays
from trainsentry.collectors.series import GRADIENT
from trainsentry.collectors.statistics import ZEROS

REST: Final = 1
USUAL_REST: Final = 8
"""Samples in a row in which a gradient may be zero as a whole; the second for one that was so before and came back. A
step without a gradient harms no weight, and detectors of objects have it in each batch without an object."""

MOST: Final = 0.5
"""Share of a record's gradients above which they do not rest: the loss itself is cut."""


class RestingGradients:
    """Follows for how many samples in a row each gradient has been zero as a whole."""

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_gradient = arrays.series.column(bool, of=lambda s: s.quantity == GRADIENT)
        self._zero_for = arrays.series.column(np.int64)
        self._has_rested = arrays.series.column(bool)

    def rows(self, observed: Observed) -> Mask:
        """Return which rows are of gradients that rest, shape (n,); take in the record."""
        record = observed.record
        gradients = self._is_gradient.values[record.where] & ~observed.excused
        zero: Mask = gradients & (record.columns[ZEROS] == 1)
        ids, before = record.ids[gradients], self._zero_for.values[record.ids[gradients]]
        if not zero.any() and not before.any():
            return zero
        now = zero[gradients]
        self._has_rested.values[ids] |= (before > 0) & (before <= USUAL_REST) & ~now
        self._zero_for.values[ids] = np.where(now, before + 1, 0)
        if now.mean() > MOST:
            return np.zeros(len(record), bool)
        longest = np.where(self._has_rested.values[record.ids], USUAL_REST, REST)
        resting: Mask = zero & (self._zero_for.values[record.ids] <= longest)
        return resting
