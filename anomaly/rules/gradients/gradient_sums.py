"""A gradient that does not add up to what its module's output got in the backward pass."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import GRADIENT_FLOW, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.gradients.module_totals import ModuleTotals
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_GRAD_OUTPUT, ACTIVATION_OUTPUT, GRADIENT

SCORE: Final = 80.0
"""Deviations: as strong as a rule whose bound holds for any run."""

HELD_FOR: Final = 6
"""Samples in a row in which the sums must have been equal: in runs on several ranks they are not, nor where a module's
weights are used elsewhere too."""

NOISE: Final = 1e-6
"""Gap of the sums, in norm × √n of the gradients at the output, that is rounding in float32: runs of a GPT and a ResNet
had 5e-8 at most."""

EQUAL: Final = 0.05
"""Share of the sum up to which two sums are equal where that is larger, until the parameter's own gap is known."""

LARGEST_TIMES: Final = 30.0
"""A gap must also be this many times the largest one of the parameter so far."""

BROKEN: Final = 0.1
"""Least share of the larger sum by which the sums of a broken parameter differ."""

ALIKE: Final = 2e-3
"""Relative difference of quotients that are one factor: what clipping and loss scaling divide by, alike for all."""

FEWEST: Final = 2
"""Parameters whose quotients must agree: else that factor is not known, unless it was one at all samples before."""

MOST_AT_ONCE: Final = 0.5
"""Share of the parameters followed up to which a break is a fault of some: more is another way of clipping."""


class GradientSumsRule(Rule):
    """Compares the sum of a parameter's gradient with the sum of the gradients at its module's output.

    They are equal, but for one factor of all parameters (clipping, loss scaling), wherever a parameter is added to the
    output, as every bias is, and for a table of embeddings: the chain rule hands each element on with weight one. What
    changes a gradient between the backward pass and the update breaks it, be it a sum of one bucket in place of its
    mean, a kernel that keeps one of several contributions, or noise. Parameters for which it has held are followed; a
    table whose gradient has no zeros gets another part from a head that shares it, which the loss may change.
    """

    name: ClassVar[str] = "gradient_sums"
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT, ACTIVATION_GRAD_OUTPUT})
    statistics: ClassVar[frozenset[str]] = frozenset({"mean", "norm", "zeros"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._table, self._totals = arrays.table, arrays.shared(ModuleTotals)
        series = arrays.series
        self._is_bias = series.column(bool, of=lambda s: s.name.endswith("bias"))
        self._held, self._parts = series.column(np.int64), series.column(np.int64)
        self._largest = series.column(np.float64)
        self._with_one = 0  # samples in a row in which the common factor was one

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the gradients of the step before this one whose sums are wrong; a step may have several records."""
        given = self._totals.ended_by(observed)
        if given is None:
            return []
        with np.errstate(over="ignore", invalid="ignore"):
            scale = np.sqrt(given.output_squares * given.output_numel)
            usable = (scale > 0) & np.isfinite(scale + given.output_sums + given.sums)
        usable &= (given.has_zeros | self._is_bias.values[given.ids]) & ~given.is_coarse
        sums = _Sums(given.ids[usable], given.sums[usable], given.output_sums[usable], scale[usable])
        parts = given.parts[usable]
        followed = (self._held.values[sums.ids] >= HELD_FOR) & (self._parts.values[sums.ids] == parts)
        factor = _common_factor(sums, followed if followed.sum() >= FEWEST else None)
        if math.isnan(factor) and self._with_one < HELD_FOR:
            return []
        self._with_one = self._with_one + 1 if math.isnan(factor) or abs(math.log(factor)) < ALIKE else 0
        factor = 1.0 if math.isnan(factor) else factor
        sums = replace(sums, found=sums.found / factor)
        broken = self._compare(sums, parts, followed)
        broken[_clipped_apart(sums, rows_where(broken), factor)] = False
        orders = given.orders[usable]
        return [f for i in rows_where(broken).tolist() for f in self._findings(sums, i, int(orders[i]), given.step)]

    def _compare(self, sums: "_Sums", parts: Integers, followed: Mask) -> Mask:
        """Return which parameters are followed and have sums that are not equal; learn from the others."""
        ids, held, largest = sums.ids, self._held.values, self._largest.values
        gap, expected = np.abs(sums.found - sums.expected) / sums.scale, np.abs(sums.expected) / sums.scale
        size = np.maximum(np.abs(sums.found) / sums.scale, expected)
        holds = gap <= np.maximum(NOISE, EQUAL * expected)
        holds &= self._is_bias.values[ids] | (size > 10 * NOISE)  # two sums of zero say nothing but of a bias
        broken = followed & (gap > np.maximum(NOISE, LARGEST_TIMES * largest[ids])) & (gap > BROKEN * size)
        learns = holds & ~broken & ((self._parts.values[ids] == parts) | (held[ids] == 0))
        held[ids] = np.where(learns, held[ids] + 1, 0)
        largest[ids] = np.where(learns, np.maximum(largest[ids], gap), 0.0)
        self._parts.values[ids] = parts
        return broken if broken.sum() <= MOST_AT_ONCE * followed.sum() else np.zeros(len(ids), bool)

    def _findings(self, sums: "_Sums", place: int, order: int, step: int) -> list[Finding]:
        """Return the finding of a parameter, and a suspicion of its module's output."""
        series_id = int(sums.ids[place])
        numbers = float(sums.found[place]), float(sums.expected[place])
        detail = (GRADIENT_FLOW, self.name, "mean", *numbers, SCORE)
        found = Finding(series_id, order, *detail, step=step, last_clean=step - 1, passed_on=False)
        output = f"{self._table.series[series_id].name.rpartition('.')[0]}.output.0"
        return [found, replace(found, passed_on=True, alarm=False, name=output, quantity=ACTIVATION_OUTPUT)]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return both sums."""
        if anomaly.quantity == ACTIVATION_OUTPUT:
            return f"{subject} may have been changed at step {anomaly.step} after its module computed it"
        return (
            f"{subject} adds up to {anomaly.value:.3g} at step {anomaly.step}, the gradients at its module's output to "
            f"{anomaly.expected:.3g}: its backward pass is wrong, or something has changed the gradient or that output"
        )


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums of gradients as `found`, and as `expected` of the module's output, whose size is `scale`; shape (n,)."""

    ids: Integers
    found: Floats
    expected: Floats
    scale: Floats


def _clipped_apart(sums: _Sums, broken: Integers, factor: float) -> Integers:
    """Return which of the broken ones belong to a part of the model with a clipping of its own.

    They are smaller by one factor, or have none of the `factor` by which the others were clipped.
    """
    found, expected = sums.found[broken], sums.expected[broken]
    alike = found * expected > 0
    whole = np.zeros(len(broken), bool)
    whole[alike] = np.abs(np.log(found[alike] * factor / expected[alike])) < ALIKE
    smaller = broken[alike & ~whole & (np.abs(found) < np.abs(expected))]
    logs = np.log(sums.found[smaller] / sums.expected[smaller])
    order = np.argsort(logs)
    near = np.diff(logs[order], prepend=-np.inf, append=np.inf) < ALIKE
    return np.concatenate((broken[whole], smaller[order[near[:-1] | near[1:]]]))


def _common_factor(sums: _Sums, followed: Mask | None) -> float:
    """Return the quotient of the sums on which most parameters agree, NaN where they are too few.

    Without parameters that are followed it is looked for among all.
    """
    chosen = (np.abs(sums.expected) > 10 * NOISE * sums.scale) & (sums.found * sums.expected > 0)
    if followed is not None:
        chosen &= followed
    logs = np.sort(np.log(sums.found[chosen] / sums.expected[chosen]))
    counts = np.searchsorted(logs, logs + ALIKE, side="right") - np.arange(len(logs))
    if counts.max(initial=0) < FEWEST:
        return math.nan
    begin = int(np.argmax(counts))
    return math.exp(float(np.median(logs[begin : begin + counts[begin]])))
