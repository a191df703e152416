"""Layers that a loop begins to train in the middle of a run: many parameters get their first gradient at once."""

from typing import Final

import numpy as np

from trainsentry.anomaly.series_arrays import SeriesArrays
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import GRADIENT

RECORDS_BEFORE: Final = 20
"""Records with gradients before first ones are those of thawed layers: experts get their first tokens by and by."""

LEAST_SHARE: Final = 0.1
"""Share of a record's gradients that must be first ones: an expert or a head that is used at last is less."""


class ThawedLayers:
    """Follows which parameters have had a gradient; `at` is the newest step at which layers were thawed, -1 for none.

    Who thaws layers often begins the schedule anew, and clears the optimizer's state, as fastai does.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_gradient = arrays.series.column(bool, of=lambda s: s.quantity == GRADIENT and not s.micro_step)
        self._had = arrays.series.column(bool)
        self._records = 0
        self._noted: StepRecord | None = None
        self.at = -1

    def thaws(self, record: StepRecord) -> bool:
        """Return whether a record shows layers that were thawed; what several ask for is taken in once."""
        if record is not self._noted:
            self._noted = record
            ids = record.ids[self._is_gradient.values[record.where]]
            new = ~self._had.values[ids]
            if self._records >= RECORDS_BEFORE and new.any() and np.mean(new) >= LEAST_SHARE:
                self.at = record.step
            self._had.values[ids] = True
            self._records += len(ids) > 0
        return self.at == record.step
