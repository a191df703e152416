"""A running variance of a norm that is negative."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Mask, SeriesArrays, rows_where
from trainsentry.collectors.series import BUFFER
from trainsentry.collectors.statistics import MIN

SCORE: Final = 80.0
"""Deviations: as strong as a rule whose bound holds for any run."""

VARIANCES: Final = ("running_var", "moving_variance")
"""Ends of the names of buffers that average variances, in torch and in MindSpore."""


class NegativeVarianceRule(Rule):
    """Finds variances below zero, which no average of squares is; those of optimizers belong to `state_reset`."""

    name: ClassVar[str] = "negative_variance"
    quantities: ClassVar[frozenset[str]] = frozenset({BUFFER})
    statistics: ClassVar[frozenset[str]] = frozenset({"min"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_variance = arrays.series.column(bool, of=lambda s: s.quantity == BUFFER and s.name.endswith(VARIANCES))
        self._is_told = arrays.series.column(bool)
        self.wrong_rows: Mask | None = np.zeros(0, bool)

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the variances that are negative, each once until it is not."""
        record = observed.record
        negative = self._is_variance.values[record.where] & (record.columns[MIN] < 0)
        self.wrong_rows = negative
        new = negative & ~self._is_told.values[record.where]
        self._is_told.values[record.where] = negative
        return [
            Finding(int(record.ids[row]), row, SHIFT, self.name, "min", float(record.values[row, MIN]), 0.0, SCORE)
            for row in rows_where(new).tolist()
        ]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the smallest value."""
        return f"{subject} is negative at step {anomaly.step} ({anomaly.value:.3g}), although it averages variances"
