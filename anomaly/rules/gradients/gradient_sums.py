"""A gradient that does not add up to what its module's output got in the backward pass."""

import math
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import GRADIENT_FLOW, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.gradients.module_totals import NO_MODULE, ModuleTotals
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_GRAD_OUTPUT, ACTIVATION_OUTPUT, GRADIENT
from trainsentry.collectors.statistics import MEAN, ZEROS

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
        self._table, self._totals = arrays.table, ModuleTotals(arrays)
        series = arrays.series
        self._is_bias = series.column(bool, of=lambda s: s.name.endswith("bias"))
        self._held, self._parts = series.column(np.int64), series.column(np.int64)
        self._largest = series.column(np.float64)
        self._gradients: list[tuple[Integers, Integers, Floats, Mask]] = []
        self._step, self._excused = -1, False
        self._with_one = 0  # samples in a row in which the common factor was one

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the gradients of the step before this one whose sums are wrong; a step may have several records."""
        record = observed.record
        found: list[Finding] = []
        if record.step != self._step:
            found = self._end_step()
            self._step, self._excused, self._gradients = record.step, False, []
            self._totals.begin_step()
        self._excused |= record.skipped
        self._totals.add(observed)
        if not self._totals.has_any:
            return found
        rows = rows_where(self._totals.module_of[record.where] != NO_MODULE)
        if len(rows):
            sums, orders = record.values[rows, MEAN] * observed.numel[rows], record.first_order + rows
            self._gradients.append((record.ids[rows].astype(np.int64), orders, sums, record.values[rows, ZEROS] > 0))
        return found

    def _end_step(self) -> list[Finding]:
        if self._excused or not self._gradients or not self._totals.has_any:
            return []
        ids, rows, sums, sparse = (np.concatenate(parts) for parts in zip(*self._gradients, strict=True))
        modules = self._totals.module_of[ids]
        with np.errstate(over="ignore", invalid="ignore"):
            scale = np.sqrt(self._totals.square[modules] * self._totals.numel[modules])
            expected = self._totals.sum[modules]
        usable = (self._totals.parts[modules] > 0) & (scale > 0) & np.isfinite(scale + expected + sums)
        usable &= (sparse | self._is_bias.values[ids]) & ~self._totals.coarse[modules]
        ids, rows, sums, expected, scale = (x[usable] for x in (ids, rows, sums, expected, scale))
        modules = modules[usable]
        followed = (self._held.values[ids] >= HELD_FOR) & (self._parts.values[ids] == self._totals.parts[modules])
        factor = _common_factor(sums, expected, scale, followed if followed.sum() >= FEWEST else None)
        if math.isnan(factor) and self._with_one < HELD_FOR:
            return []
        self._with_one = self._with_one + 1 if math.isnan(factor) or abs(math.log(factor)) < ALIKE else 0
        factor = 1.0 if math.isnan(factor) else factor
        broken = self._compare(ids, sums / factor, expected, scale, followed)
        broken &= ~_clipped_apart(sums / factor, expected, broken)
        return [f for i in rows_where(broken) for f in self._findings(ids[i], rows[i], sums[i] / factor, expected[i])]

    def _compare(self, ids: Integers, sums: Floats, expected: Floats, scale: Floats, followed: Mask) -> Mask:
        """Return which parameters are followed and have sums that are not equal; learn from the others."""
        gap, size = np.abs(sums - expected) / scale, np.maximum(np.abs(sums), np.abs(expected)) / scale
        largest, held = self._largest.values, self._held.values
        holds = gap <= np.maximum(NOISE, EQUAL * np.abs(expected) / scale)
        holds &= self._is_bias.values[ids] | (size > 10 * NOISE)  # two sums of zero say nothing but of a bias
        broken = followed & (gap > np.maximum(NOISE, LARGEST_TIMES * largest[ids])) & (gap > BROKEN * size)
        parts = self._totals.parts[self._totals.module_of[ids]]
        same = (self._parts.values[ids] == parts) | (held[ids] == 0)
        learns = holds & same & ~broken
        held[ids] = np.where(learns, held[ids] + 1, 0)
        largest[ids] = np.where(learns, np.maximum(largest[ids], gap), 0.0)
        self._parts.values[ids] = parts
        return broken if broken.sum() <= MOST_AT_ONCE * followed.sum() else np.zeros(len(ids), bool)

    def _findings(self, series_id: int, row: int, value: float, expected: float) -> list[Finding]:
        """Return the finding of a parameter, and a suspicion of its module's output."""
        detail = (GRADIENT_FLOW, self.name, "mean", float(value), float(expected), SCORE)
        where = {"step": self._step, "last_clean": self._step - 1}
        output = f"{self._table.series[series_id].name.rpartition('.')[0]}.output.0"
        return [
            Finding(int(series_id), int(row), *detail, passed_on=False, **where),  # type: ignore[arg-type]
            Finding(
                int(series_id), int(row), *detail, passed_on=True, alarm=False, name=output, quantity=ACTIVATION_OUTPUT,
                **where,  # type: ignore[arg-type]
            ),
        ]  # fmt: skip

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return both sums."""
        if anomaly.quantity == ACTIVATION_OUTPUT:
            return f"{subject} may have been changed at step {anomaly.step} after its module computed it"
        return (
            f"{subject} adds up to {anomaly.value:.3g} at step {anomaly.step}, the gradients at its module's output to "
            f"{anomaly.expected:.3g}: something changes it after the backward pass, or that output"
        )


def _clipped_apart(sums: Floats, expected: Floats, broken: Mask) -> Mask:
    """Return which of the broken ones are smaller by one factor: a part of the model with a clipping of its own."""
    found = np.zeros(len(broken), bool)
    smaller = rows_where(broken & (sums * expected > 0) & (np.abs(sums) < np.abs(expected)))
    logs = np.log(sums[smaller] / expected[smaller])
    order = np.argsort(logs)
    near = np.diff(logs[order]) < ALIKE
    found[smaller[order]] = (
        np.concatenate([near, [False]])[: len(order)] | np.concatenate([[False], near])[: len(order)]
    )
    return found


def _common_factor(sums: Floats, expected: Floats, scale: Floats, followed: Mask | None) -> float:
    """Return the quotient of the sums on which most parameters agree, NaN where they are too few.

    Without parameters that are followed it is looked for among all.
    """
    chosen = (np.abs(expected) > 10 * NOISE * scale) & (sums * expected > 0)
    if followed is not None:
        chosen &= followed
    logs = np.sort(np.log(sums[chosen] / expected[chosen]))
    if len(logs) < FEWEST:
        return math.nan
    ends = np.searchsorted(logs, logs + ALIKE, side="right")
    counts = ends - np.arange(len(logs))
    begin = int(np.argmax(counts))
    if counts[begin] < FEWEST:
        return math.nan
    return math.exp(float(np.median(logs[begin : ends[begin]])))
