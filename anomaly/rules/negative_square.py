"""A sum or mean of squares that is negative."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.series_arrays import Mask, SeriesArrays, rows_where
from trainsentry.collectors.series import BUFFER, Series
from trainsentry.collectors.statistics import MIN

SCORE: Final = 80.0
"""Deviations: as strong as a rule whose bound holds for any run."""

SQUARES: Final = frozenset({"exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "row_var", "col_var"})
"""States of torch's optimizers that average squares, or keep the largest magnitude, by its documentation. Names that
another optimizer may give to something else, as `sum`, are left out."""

VARIANCES: Final = ("running_var", "moving_variance")
"""Ends of the names of buffers that average variances, in torch and in MindSpore."""


class NegativeSquareRule(Rule):
    """Finds squares below zero; no arithmetic of an optimizer or a norm gives them, not even by rounding."""

    name: ClassVar[str] = "negative_square"
    quantities: ClassVar[frozenset[str]] = frozenset({OPTIMIZER_STATE, BUFFER})
    statistics: ClassVar[frozenset[str]] = frozenset({"min"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_square = arrays.series.column(bool, of=_is_square)
        self._is_told = arrays.series.column(bool)
        self.wrong_rows: Mask | None = np.zeros(0, bool)

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the series with a negative square, each once until it has none."""
        record = observed.record
        negative = self._is_square.values[record.where] & (record.columns[MIN] < 0)
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
        return f"{subject} has an element of {anomaly.value:.3g} at step {anomaly.step}, and cannot be below zero"


def _is_square(series: Series) -> bool:
    if series.quantity == BUFFER:
        return series.name.endswith(VARIANCES)
    return series.is_state and series.quantity in SQUARES
