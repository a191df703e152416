"""A module that was switched between training and evaluation mode while the run goes on."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import MODE_CHANGE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays
from trainsentry.collectors.series import TRAINING_MODE
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as only a person or a forgotten call switches a mode."""


class ModeChangeRule(Rule):
    """Reports each row of a `training_mode` scalar: the collector makes one only when a mode has changed."""

    name: ClassVar[str] = "mode_change"
    speaks_for: ClassVar[str | None] = MODE_CHANGE
    quantities: ClassVar[frozenset[str]] = frozenset({TRAINING_MODE})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_mode = arrays.series.column(bool, of=lambda s: s.quantity.startswith(TRAINING_MODE))

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding for each module whose mode has changed."""
        record = observed.record
        found = []
        for row in np.flatnonzero(self._is_mode.values[record.where]).tolist():
            now, series_id = float(record.values[row, VALUE]), int(record.ids[row])
            detail = (MODE_CHANGE, self.name, "value", now, 1 - now, SCORE)
            found.append(Finding(series_id, row, *detail, passed_on=False))
        return found

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the mode that the module has now."""
        mode = "training" if anomaly.value else "evaluation"
        return f"{subject} was switched to {mode} mode by step {anomaly.step}"
