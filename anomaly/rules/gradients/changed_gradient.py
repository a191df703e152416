"""A gradient that is not what the backward pass left, but for a factor: something has written to it in between."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import GRADIENT_FLOW, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import GRADIENT, GRADIENT_UNREDUCED, Series
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM, STATISTICS

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as only rounding tells the two apart."""

HELD: Final = 10
"""Samples in which a gradient was what the backward pass left, before one that is not counts."""

TOLERANCE: Final = 1e-3
"""Share of the largest element, or for the mean of the root mean square, by which the two may differ: float32 rounds by
1e-7, and a program that changes elements by less does not change the training."""

TOGETHER: Final = 0.1
"""Share of the gradients that may be changed at once by a fault; a loop that begins to add noise changes all."""

_COMPARED: Final = np.array([MIN, MAX, MEAN, NORM])


class ChangedGradientRule(Rule):
    """Compares each gradient with itself before the reduction, where that is read: with one rank nothing may change it.

    Clipping by norm, the loss scale and averaging multiply a gradient by a factor, which the norms give; its extremes
    and its mean follow. A sign, single elements, a part, or the tensor of another parameter do not. Where the factor of
    a parameter was that of most others, it still is, as clipping leaves none out. Clipping by value, which shrinks the
    extremes, is no finding, and where some gradients were made smaller than others from the start (adaptive clipping,
    Brock et al., 2021), none that is smaller is one.
    """

    name: ClassVar[str] = "changed_gradient"
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT, GRADIENT_UNREDUCED})
    statistics: ClassVar[frozenset[str]] = frozenset({"min", "max", "mean", "norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_left = arrays.series.column(bool, of=lambda s: s.quantity == GRADIENT_UNREDUCED)
        self._is_used = arrays.series.column(bool, of=lambda s: s.quantity == GRADIENT and not s.scalar)
        self._parameter = arrays.series.column(np.int64, -1, of=self._parameter_of)
        self._numbers: dict[tuple[int, str], int] = {}
        self._held = arrays.series.column(np.int64)
        self._shrinks = False  # the program makes some gradients smaller than others

    def _parameter_of(self, series: Series) -> int:
        if series.quantity not in self.quantities:
            return -1
        return self._numbers.setdefault((series.vpp_stage, series.name), len(self._numbers))

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the gradients that were changed since the backward pass, if they are few."""
        record = observed.record
        left, used = self._pairs(record)
        if not len(left) or record.skipped:
            return []
        with np.errstate(all="ignore"):
            differences, expected = _differences(record.values[left], record.values[used], observed.numel[used])
            known = np.isfinite(differences).all(axis=1)
            changed = known & (differences > TOLERANCE).any(axis=1)
        ids = record.ids[used]
        judged = known & (self._held.values[ids] >= HELD)
        smaller = changed & (record.values[used, NORM] < (1 - TOLERANCE) * expected[:, -1])
        self._shrinks |= bool((smaller & ~judged).any())
        excused = _are_clipped(record.values[used], expected) | (smaller & self._shrinks)
        found = rows_where(changed & judged & ~excused)
        self._held.values[ids] = np.where(changed, 0, self._held.values[ids] + known)
        if len(found) > max(1, TOGETHER * judged.sum()):
            return []
        return [self._finding(record, int(used[i]), differences[i], expected[i]) for i in found.tolist()]

    def _pairs(self, record: StepRecord) -> tuple[Integers, Integers]:
        """Return the rows of gradients before the reduction, each the last of its parameter, and those used."""
        left, used = rows_where(self._is_left.values[record.where]), rows_where(self._is_used.values[record.where])
        if not len(left) or not len(used):
            return left[:0], used[:0]
        last = dict(zip(self._parameter.values[record.ids[left]].tolist(), left.tolist(), strict=True))
        parameters = self._parameter.values[record.ids[used]].tolist()
        pairs = [(last[p], row) for p, row in zip(parameters, used.tolist(), strict=True) if p in last]
        both = np.array(pairs, np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def _finding(self, record: StepRecord, row: int, differences: Floats, expected: Floats) -> Finding:
        worst = int(np.argmax(differences))
        statistic, value = STATISTICS[_COMPARED[worst]], float(record.values[row, _COMPARED[worst]])
        detail = (GRADIENT_FLOW, self.name, statistic, value, float(expected[worst]), SCORE)
        return Finding(int(record.ids[row]), row, *detail, passed_on=False)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return what the gradient has, and what the backward pass left gives."""
        return (
            f"something changed {subject} after the backward pass of step {anomaly.step}: its {anomaly.statistic} is "
            f"{anomaly.value:.6g}, and what the backward pass left gives {anomaly.expected:.6g}"
        )


def _differences(left: Floats, used: Floats, numel: Floats) -> tuple[Floats, Floats]:
    """Return by how much gradients differ from those before, scaled alike, and what these give, both (n, 4).

    Extremes and mean are scaled by the norms' own factor, and the norm by the usual one of all parameters.
    """
    factor = used[:, NORM] / left[:, NORM]
    expected = factor[:, None] * left[:, _COMPARED]
    known = factor[~np.isnan(factor)]
    expected[:, -1] = (np.median(known) if len(known) else np.nan) * left[:, NORM]
    size = np.abs(expected[:, :2]).max(axis=1)
    usual = used[:, NORM] / np.sqrt(numel)
    unit = np.stack((size, size, usual, expected[:, -1]), axis=1)
    found: Floats = np.abs(used[:, _COMPARED] - expected) / unit
    return found, expected


def _are_clipped(used: Floats, expected: Floats) -> Mask:
    """Return which gradients have smaller extremes than those before, scaled alike: their elements were clipped."""
    now, before = np.abs(used[:, [MIN, MAX]]).max(axis=1), np.abs(expected[:, :2]).max(axis=1)
    clipped: Mask = now < (1 - TOLERANCE) * before
    return clipped
