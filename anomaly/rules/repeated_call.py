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


EQUAL_IN_ALL: Final = 30
"""Outputs of any module that came out equal, and none that varied, after which one that comes out otherwise each time
is a fault too: these kernels are repeatable, and a device that errs at random gives no two equal results."""

SIDES: Final = {RECOMPUTED: ("output", ACTIVATION_OUTPUT), RECOMPUTED_GRADIENT: ("input", ACTIVATION_GRAD_INPUT)}
"""The side and the quantity of a module that a scalar with such a prefix speaks of."""


class RepeatedCallRule(Rule):
    """Judges how many elements of a module's output, or of its gradients, differ from two calls that agree.

    A module whose two calls have ever differed from each other is never judged again: its kernel is not repeatable. The
    first one that does so is a finding, where all outputs of the run have been repeatable so far.

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
        self._outputs_equal, self._some_vary = 0, False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the modules whose output, or whose gradients, cannot be had again."""
        record = observed.record
        found = []
        for row in rows_where(self._is_repeated.values[record.where]).tolist():
            series_id, differing = int(record.ids[row]), float(record.values[row, VALUE])
            series = observed.table.series[series_id]
            side, quantity = SIDES[_prefix_of(series)]
            enough = self._equal.values[series_id] >= EQUAL_BEFORE[quantity]
            at_random = self._errs_at_random(quantity, differing)
            self._varies.values[series_id] |= math.isnan(differing)
            if enough and (at_random or (differing > 0 and not self._varies.values[series_id])):
                detail = (ARITHMETIC, self.name, "elements", differing, 0.0, SCORE)
                name = f"{series.module}.{side}.0"
                found.append(Finding(series_id, row, *detail, passed_on=False, name=name, quantity=quantity))
            self._equal.values[series_id] += differing == 0
        return found

    def _errs_at_random(self, quantity: str, differing: float) -> bool:
        """Count an output that was computed again; return whether it varies as the first one of many."""
        if quantity != ACTIVATION_OUTPUT:
            return False
        is_first = math.isnan(differing) and not self._some_vary and self._outputs_equal >= EQUAL_IN_ALL
        self._some_vary |= math.isnan(differing)
        self._outputs_equal += differing == 0
        return is_first

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return how many elements differ, and what that says."""
        if math.isnan(anomaly.value):
            return (
                f"{subject} came out otherwise each time that its call was computed again at step {anomaly.step}, "
                "although all calls before were repeatable: the device computes wrongly at random"
            )
        elements = "1 element" if anomaly.value == 1 else f"{anomaly.value:.0f} elements"
        again = "the call was computed again"
        if anomaly.quantity == ACTIVATION_GRAD_INPUT:
            module = anomaly.name.removesuffix(".input.0")
            subject, again = f"the gradients that {module} computes", "its backward pass ran again"
        return (
            f"{elements} of {subject} came out otherwise when {again} at step {anomaly.step}, "
            "twice alike: the device computes wrongly, memory was overwritten, or a hook that was added changes it"
        )


def _prefix_of(series: Series) -> str:
    return series.name.partition(".")[0] if series.scalar else ""
