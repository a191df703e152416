"""Layers that a loop begins to train in the middle of a run: many parameters get their first gradient at once."""

from typing import Final

import numpy as np

from trainsentry.anomaly.series_arrays import SeriesArrays
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import GRADIENT

STEPS_BEFORE: Final = 20
"""Steps with gradients before first ones are those of thawed layers: experts get their first tokens by and by."""

LEAST_SHARE: Final = 0.1
"""Share of all gradients so far that must be first ones: an expert or a head that is used at last is less."""


class ThawedLayers:
    """Follows which parameters have had a gradient; `at` is the newest step at which layers were thawed, -1 for none.

    Who thaws layers often begins the schedule anew, and clears the optimizer's state, as fastai does.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_gradient = arrays.series.column(bool, of=lambda s: s.quantity == GRADIENT and not s.micro_step)
        self._had = arrays.series.column(bool)
        self._steps, self._step = 0, -1
        self._noted: StepRecord | None = None
        self.at = -1

    def thaws(self, record: StepRecord) -> bool:
        """Return whether a record shows layers that were thawed; what several ask for is taken in once."""
        if record is not self._noted:
            self._noted = record
            if record.step < self.at:  # the run goes back
                self.at = -1
            ids = record.ids[self._is_gradient.values[record.where]]
            new = ids[~self._had.values[ids]]
            if len(new):
                self._had.values[new] = True
                if self._steps > STEPS_BEFORE and len(new) >= LEAST_SHARE * np.count_nonzero(self._had.values):
                    self.at = record.step
            self._steps += len(ids) > 0 and record.step != self._step
            self._step = record.step if len(ids) else self._step
        return self.at == record.step
