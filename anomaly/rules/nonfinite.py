"""Hard rule: a value is NaN or Inf where it was not meant to be."""

import numpy as np

from trainsentry.anomaly.series_facts import Mask, SeriesFacts
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.statistics import INFS, NANS

NAME = "nonfinite"
SCORE = 1000.0
"""Score of a non-finite value: above every score that a distance from normal reaches in practice."""


class NonfiniteRule:
    """Finds rows that count a NaN or Inf.

    An activation that holds Inf from its first sample on (a mask filled with -Inf) is meant to, and is not
    reported for Inf again; NaN always is.
    """

    def __init__(self, facts: SeriesFacts) -> None:
        self.facts = facts
        self._met: Mask = np.zeros(0, bool)
        self._usual: Mask = np.zeros(0, bool)

    def rows(self, record: StepRecord) -> Mask:
        """Return which rows are not finite, as a mask of shape (n,)."""
        self.facts.refresh()
        missing = len(self.facts.scalar) - len(self._met)
        if missing:
            self._met = np.append(self._met, np.zeros(missing, bool))
            self._usual = np.append(self._usual, np.zeros(missing, bool))
        where = record.where
        nans, infs = record.columns[NANS] > 0, record.columns[INFS] > 0
        if not self._met[where].all():
            first = ~self._met[where]
            self._usual[record.ids[first & infs & ~nans & self.facts.activation[where]]] = True
            self._met[where] = True
        found: Mask = nans | (infs & ~self._usual[where])
        return found

    def is_usual(self, record: StepRecord) -> Mask:
        """Return which rows are meant to hold Inf."""
        usual: Mask = self._usual[record.where]
        return usual
