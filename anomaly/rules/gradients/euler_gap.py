"""A module's backward pass that no longer computes the gradients of its forward pass."""

import math
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import GRADIENT_FLOW, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_GRAD_INPUT, ACTIVATION_OUTPUT, EULER_GAP, GRADIENT, Series
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 90.0
"""Deviations: above rules with one witness, as the output and the gradients bear witness against each other."""

HOLDS: Final = 0.02
"""Largest gap that is rounding: 1e-6 in a GPT and a ResNet in float32; in a net of a table, convolutions and linear
layers up to 2e-5, and 6e-3 under autocast to bfloat16."""

EACH_OTHER: Final = "gap of both"
"""The statistic of the gap between the two gradients that a module computes."""

LEAST: Final = 1e-6
"""Gap below which a smaller one says no more: it is exactly zero where a rectifier computes as it should."""

EVIDENCE: Final = 9.0
"""Decimal digits that the gaps of a module must have been near zero by, added up over its turns, before it is known to
keep the identity. A module without it has a gap below x in about a share x of its turns."""

FEWEST: Final = 3
"""Turns that this takes at least."""

LARGEST_TIMES: Final = 30.0
"""A gap must also be this many times the largest one so far: that of tanh grows from zero with its inputs."""

BROKEN: Final = 0.05
"""Least gap that is none of rounding: tensors that have nothing to do with each other have one of about 1."""

INPUT: Final = "input"
GRADIENTS: Final = "gradients"
"""The sides of a module that are none of its parameters; the second is that of its input against its weight."""


class EulerGapRule(Rule):
    """Judges the gaps of modules that have kept Euler's identity: what their gradients add up to with their tensors.

    A wrong kernel's gradients, transposed, of the wrong mask, without some contributions, have the sizes of right ones,
    and only the identity parts. Where it does on both sides of a module, its output is wrong, or what its backward pass
    makes of the gradient at it.

    (Euler's theorem on homogeneous functions; for the use against wrong results of matrix kernels compare Freivalds,
    "Probabilistic machines can use less running time", IFIP 1977.)
    """

    name: ClassVar[str] = "euler_gap"
    quantities: ClassVar[frozenset[str]] = frozenset({EULER_GAP})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        prefix = f"{EULER_GAP}."
        series = arrays.series
        self._is_gap = series.column(bool, of=lambda s: s.scalar and s.name.startswith(prefix))
        self._evidence, self._largest = series.column(np.float64), series.column(np.float64)
        self._turns = series.column(np.int64)
        self._step = series.column(np.int64, -1)

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the modules whose gradients do not fit their tensors any more."""
        record = observed.record
        broken: dict[str, list[Finding]] = {}
        for row in rows_where(self._is_gap.values[record.where]).tolist():
            series_id, gap = int(record.ids[row]), float(record.values[row, VALUE])
            series = observed.table.series[series_id]
            if not math.isfinite(gap):
                continue
            if self._breaks(series_id, gap):
                broken.setdefault(_module_of(series), []).append(self._finding(record, row, series, gap))
            else:
                self._step.values[series_id] = record.step
        return [_of_module(module, found) for module, found in broken.items()]

    def _breaks(self, series_id: int, gap: float) -> bool:
        """Take in a gap; return whether it breaks an identity that has held."""
        evidence, largest, turns = self._evidence.values, self._largest.values, self._turns.values
        if gap <= HOLDS:
            evidence[series_id] -= math.log10(max(gap, LEAST))
            largest[series_id], turns[series_id] = max(largest[series_id], gap), turns[series_id] + 1
            return False
        held = bool(evidence[series_id] >= EVIDENCE and turns[series_id] >= FEWEST)
        if held and gap > max(BROKEN, LARGEST_TIMES * largest[series_id]):
            return True
        evidence[series_id] = largest[series_id] = turns[series_id] = 0
        return False

    def _finding(self, record: StepRecord, row: int, series: Series, gap: float) -> Finding:
        series_id = int(record.ids[row])
        module, side = _module_of(series), series.name.rpartition(".")[2]
        name, quantity = f"{module}.{side}".lstrip("."), GRADIENT
        if side in {INPUT, GRADIENTS}:
            name, quantity = f"{module}.input.0".lstrip("."), ACTIVATION_GRAD_INPUT
        statistic, before = EACH_OTHER if side == GRADIENTS else "gap", float(self._largest.values[series_id])
        detail = (GRADIENT_FLOW, self.name, statistic, gap, before, SCORE)
        where = {"last_clean": int(self._step.values[series_id]), "passed_on": False}
        return Finding(series_id, row, *detail, **where, name=name, quantity=quantity)  # type: ignore[arg-type]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the gap, and what it says."""
        before = max(anomaly.expected, LEAST)
        gap = f"their inner products differ by {anomaly.value:.2g} (at most {before:.1g} before)"
        if anomaly.quantity == ACTIVATION_OUTPUT:
            return (
                f"{subject} and the gradients that its module computes at step {anomaly.step} no longer fit each "
                f"other: {gap}"
            )
        if anomaly.statistic == EACH_OTHER:
            module = anomaly.name.removesuffix(".input.0")
            return (
                f"the gradients that the backward pass of {module} computes for its input and its weight at step "
                f"{anomaly.step} no longer fit each other: {gap}"
            )
        return (
            f"{subject}, as the module's own backward pass computes it at step {anomaly.step}, no longer fits the "
            f"module's output and its gradient: {gap}"
        )


def _module_of(series: Series) -> str:
    return series.name.partition(".")[2].rpartition(".")[0]


def _of_module(module: str, found: list[Finding]) -> Finding:
    """Return the finding of a module: of one side, or of its output where both have parted from it."""
    if len(found) == 1:
        return found[0]
    worst = max(found, key=lambda f: f.value)
    return replace(worst, name=f"{module}.output.0".lstrip("."), quantity=ACTIVATION_OUTPUT)
