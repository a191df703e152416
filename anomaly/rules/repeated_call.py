"""A module's call that gives something else when it is computed again: the device has computed wrongly."""

import math
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import ARITHMETIC, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_OUTPUT,
    RECOMPUTED,
    RECOMPUTED_GRADIENT,
    Series,
)
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 100.0
"""Deviations: a rule whose bound holds for any run, as equal computations of equal numbers give equal bits."""

EQUAL_BEFORE: Final = {ACTIVATION_OUTPUT: 1, ACTIVATION_GRAD_INPUT: 3}
"""Calls of the module that came out equal before one that does not counts: a hook may change its outputs by design, and
kernels of gradients that sum in any order may agree by chance."""


SIDES: Final = {RECOMPUTED: ("output", ACTIVATION_OUTPUT), RECOMPUTED_GRADIENT: ("input", ACTIVATION_GRAD_INPUT)}
"""The side and the quantity of a module that a scalar with such a prefix speaks of."""


class RepeatedCallRule(Rule):
    """Judges how many elements of a module's output, or of its gradients, differ from two calls that agree.

    A module whose two calls have ever differed from each other is never judged: its kernel is not repeatable.

    (Hochschild et al., "Cores that don't count", HotOS 2021; Dixit et al., "Silent data corruptions at scale", 2021.)
    """

    name: ClassVar[str] = "repeated_call"
    speaks_for: ClassVar[str | None] = ARITHMETIC
    quantities: ClassVar[frozenset[str]] = frozenset(SIDES)
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_repeated = arrays.series.column(bool, of=lambda s: s.scalar and _prefix_of(s) in SIDES)
        self._equal = arrays.series.column(np.int64)
        self._varies = arrays.series.column(bool)

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the modules whose output, or whose gradients, cannot be had again."""
        record = observed.record
        found = []
        for row in rows_where(self._is_repeated.values[record.where]).tolist():
            series_id, differing = int(record.ids[row]), float(record.values[row, VALUE])
            series = observed.table.series[series_id]
            side, quantity = SIDES[_prefix_of(series)]
            self._varies.values[series_id] |= math.isnan(differing)
            enough = self._equal.values[series_id] >= EQUAL_BEFORE[quantity]
            if differing > 0 and enough and not self._varies.values[series_id]:
                detail = (ARITHMETIC, self.name, "elements", differing, 0.0, SCORE)
                name = f"{series.module}.{side}.0"
                found.append(Finding(series_id, row, *detail, passed_on=False, name=name, quantity=quantity))
            self._equal.values[series_id] += differing == 0
        return found

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return how many elements differ, and what that says."""
        elements = "1 element" if anomaly.value == 1 else f"{anomaly.value:.0f} elements"
        again = "the call was computed again"
        if anomaly.quantity == ACTIVATION_GRAD_INPUT:
            module = anomaly.name.removesuffix(".input.0")
            subject, again = f"the gradients that {module} computes", "its backward pass ran again"
        return (
            f"{elements} of {subject} came out otherwise when {again} at step {anomaly.step}, "
            "twice alike: the device computes wrongly, or memory was overwritten"
        )


def _prefix_of(series: Series) -> str:
    return series.name.partition(".")[0] if series.scalar else ""
