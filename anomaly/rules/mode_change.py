"""A module that was switched between training and evaluation mode while the run goes on."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import MODE_CHANGE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import TRAINING_MODE
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as only a person or a forgotten call switches a mode."""


SETTLED: Final = 10
"""Steps of a run before modes are judged: programs set them when they begin."""

BACK_AND_FORTH: Final = 2
"""Switches of a module that are told, the second as a suspicion; what switches more often follows a schedule."""


class ModeChangeRule(Rule):
    """Reports the rows of a `training_mode` scalar: the collector makes one only when a mode has changed."""

    name: ClassVar[str] = "mode_change"
    speaks_for: ClassVar[str | None] = MODE_CHANGE
    quantities: ClassVar[frozenset[str]] = frozenset({TRAINING_MODE})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_mode = arrays.series.column(bool, of=lambda s: s.quantity.startswith(TRAINING_MODE))
        self._switches = arrays.series.column(np.int64)
        self._first_step: int | None = None

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding for each module whose mode has changed."""
        record = observed.record
        if self._first_step is None:
            self._first_step = record.step
        found = []
        for row in rows_where(self._is_mode.values[record.where]).tolist():
            now, series_id = float(record.values[row, VALUE]), int(record.ids[row])
            switches = self._switches.values[series_id] = self._switches.values[series_id] + 1
            if switches <= BACK_AND_FORTH and record.step - self._first_step >= SETTLED:
                detail = (MODE_CHANGE, self.name, "value", now, 1 - now, SCORE, bool(switches == 1))
                found.append(Finding(series_id, row, *detail, passed_on=False))
        return found

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the mode that the module has now."""
        mode = "training" if anomaly.value else "evaluation"
        return f"{subject} was switched to {mode} mode by step {anomaly.step}"
