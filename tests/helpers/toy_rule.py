"""A rule from outside the package: a gradient whose norm is above a bound."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays
from trainsentry.collectors.series import GRADIENT
from trainsentry.collectors.statistics import NORM

BOUND: Final = 1e3
"""Norm above which a gradient is reported: no healthy step of the test's model comes near it."""


class LargeGradientRule(Rule):
    """Reports each gradient the first time its norm is above the bound."""

    name: ClassVar[str] = "large_gradient"
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT})
    statistics: ClassVar[frozenset[str]] = frozenset({"norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_gradient = arrays.series.column(bool, of=lambda series: series.quantity == GRADIENT)
        self._reported = arrays.series.column(bool)

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the gradients above the bound that were not reported."""
        record = observed.record
        norms, ids = record.columns[NORM], record.ids
        rows = np.flatnonzero(self._is_gradient.values[ids] & ~self._reported.values[ids] & (norms > BOUND))
        self._reported.values[ids[rows]] = True
        return [Finding(int(ids[r]), int(r), SHIFT, self.name, "norm", float(norms[r]), BOUND, 9.0) for r in rows]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the norm and the bound."""
        return f"{subject} has a norm of {anomaly.value:.3g} at step {anomaly.step}, above {anomaly.expected:.3g}"
