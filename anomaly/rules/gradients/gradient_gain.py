"""A weight's gradient that is larger than what its module gets in both passes has made it before, or is zero."""

import math
from collections.abc import Sequence
from itertools import count
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, UNDERFLOW, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.data.data_dependence import DataDependence
from trainsentry.anomaly.rules.gradients.module_totals import ModuleTotals, StepGradients
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Columns, Floats, Integers, Mask, SeriesArrays, medians, rows_where
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    GRADIENT,
    TRAINING_MODE,
    Layout,
    Series,
)

SCORE: Final = 50.0
"""Deviations: above every spike of healthy runs, below the rules whose bounds hold for any run."""

LEAST_ELEMENTS: Final = 64
LEAST_AXES: Final = 2
"""Elements and axes of a weight that is judged: the gradient of a few swings by what each batch is, that of a norm's
weight by how its terms cancel, and that of a bias does not depend on the input."""

PAST, BETWEEN, NEWEST = 32, 12, 6
"""Samples that give the usual range, that are passed over, and that must lie beyond it: what grows by some percent a
step is still far outside a range that ended twelve samples ago."""

SAMPLES: Final = PAST + BETWEEN + NEWEST

SETTLES: Final = 8
"""Samples after which a weight is one of those by which the common factor is known."""

WIDTHS: Final = 0.6
"""Least distance from the range, in its widths: eight healthy runs of a GPT and a ResNet came to 0.03."""

LEAST_WIDTH: Final = 0.2
LEAST_SHIFT: Final = math.log(1.5)
"""Least width of a range, and least distance from it, in log units: the gain is no constant of a layer."""

YOUNG: Final = 100
LEAP: Final = 0.6
BESIDE: Final = 3
"""Samples after which the least distance is twice as large, which falls with their number, where a gain has grown
little by little; and the share of a shift that so many samples before and after its onset have between them if it is a
leap instead. Two gains of healthy runs grew by some hundredths a step as their layers began to learn, to 0.45 beyond
their range of the first fifty samples, and those of cross-attention's keys fourfold within twenty steps, as it began to
align."""

MEMORY: Final = 16.0
LARGEST_STEP: Final = 0.5
"""Samples over which the mean gain is averaged, and the most of a sample's deviation that counts, in log units."""

FEWEST: Final = 3
"""Weights whose deviations give the common factor: clipping and loss scaling divide all gradients by one number."""

MOST_AT_ONCE: Final = 0.25
"""Share of the weights up to which a shift is a fault of some: training changes many layers together."""

NO_WEIGHT: Final = -1

NEVER_ZERO_FOR: Final = 6
"""Samples without a zero gradient before one counts."""


class GradientGainRule(Rule):
    """Follows the log of ‖gradient‖ ÷ (‖gradient at the output‖ · ‖input‖) of each weight, without the common factor.

    The quotient does not depend on how large the loss is or what comes before and after the layer, so its range is
    narrow where the gradient's own is wide: noise, a factor, or growth by some percent a step, which a range of the
    gradient follows, leave it. A fall is none: a head's gain falls as fewer samples of a batch ask something of it. The
    first data of a policy's rollout have a gain of their own. A gradient of zero where the module got an input and a
    gradient is told at once. Parameters of other names than `weight` belong to modules of several layers, as an LSTM,
    where what is in between is not known.
    """

    name: ClassVar[str] = "gradient_gain"
    quantities: ClassVar[frozenset[str]] = frozenset(
        {GRADIENT, ACTIVATION_INPUT, ACTIVATION_GRAD_OUTPUT, TRAINING_MODE}
    )
    statistics: ClassVar[frozenset[str]] = frozenset({"norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._totals, self._data = arrays.shared(ModuleTotals), arrays.shared(DataDependence)
        self._is_large = arrays.layouts.column(bool, of=_is_large)
        series, number = arrays.series, count()
        self._is_mode = series.column(bool, of=lambda s: s.quantity.startswith(TRAINING_MODE))
        ids: list[int] = []  # the series of weights: few of all have a gain, so that the others take no memory for one

        def note(first: int, new: Sequence[Series]) -> None:
            ids.extend(i for i, s in enumerate(new, first) if _is_weight(s))
            self._weights.grow()

        weights = self._weights = Columns(ids)
        series.before_growth(note)
        self._weight_of = series.column(np.int64, of=lambda s: next(number) if _is_weight(s) else NO_WEIGHT)
        self._series = weights.column(np.int64, of=lambda series_id: series_id)
        self._past = weights.column(np.float32, np.nan, shape=(SAMPLES,))
        self._steps = weights.column(np.int64, -1, shape=(SAMPLES,))
        self._count, self._parts, self._nonzero = (weights.column(np.int64) for _ in range(3))
        self._mean = weights.column(np.float64)
        self._order = weights.column(np.int64)  # in the newest step

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the weights of the step before this one whose gradients are wrong; a step may have several records."""
        given = self._totals.ended_by(observed)
        found = [] if given is None else self._take(given)
        found = [f for f in found if f.kind == UNDERFLOW or not self._data.begins_rollout(f.step)]
        self._data.note(observed)
        if self._is_mode.values[observed.record.where].any():
            self._forget(slice(None))  # a norm in evaluation mode hands on the mean of its gradients, too
        return found

    def _take(self, given: StepGradients) -> list[Finding]:
        got = np.sqrt(given.output_squares) * np.sqrt(given.input_squares)
        usable = (got > 0) & np.isfinite(got) & np.isfinite(given.norms) & self._is_large.values[given.layouts]
        usable &= self._weight_of.values[given.ids] != NO_WEIGHT
        weights, norms, parts = self._weight_of.values[given.ids[usable]], given.norms[usable], given.parts[usable]
        self._forget(weights[self._parts.values[weights] != parts])  # other calls of the module
        self._parts.values[weights], self._order.values[weights] = parts, given.orders[usable]
        zero = norms == 0
        found = self._zeros(weights, zero, given.step) if zero.any() else []
        self._nonzero.values[weights[~zero]] += 1
        return found + self._follow(weights[~zero], np.log(norms[~zero] / got[usable][~zero]), given.step)

    def _zeros(self, ids: Integers, zero: Mask, step: int) -> list[Finding]:
        """Return the weights that have no gradient although their modules got one, where most others have."""
        new = ids[zero & (self._nonzero.values[ids] >= NEVER_ZERO_FOR)]
        self._forget(ids[zero])
        self._nonzero.values[ids[zero]] = 0
        if len(new) > max(1, MOST_AT_ONCE * len(ids)):
            return []
        return [self._finding(i, UNDERFLOW, 0.0, step) for i in new.tolist()]

    def _follow(self, ids: Integers, logs: Floats, step: int) -> list[Finding]:
        """Take in the gains of a step; return the weights whose newest ones lie beyond their range."""
        taken, mean = self._count.values, self._mean.values
        settled = taken[ids] >= SETTLES
        if settled.sum() >= FEWEST:
            logs = logs - medians((logs - mean[ids])[settled][None])[0]
        elif (taken[ids] > 0).any() and len(ids) < FEWEST:
            return []
        off = np.where(taken[ids] > 0, logs - mean[ids], 0.0)
        start = np.where(taken[ids] > 0, mean[ids], logs)
        mean[ids] = start + np.clip(off, -LARGEST_STEP, LARGEST_STEP) / np.minimum(taken[ids] + 1, MEMORY)
        past, steps = self._past.values, self._steps.values
        past[:, ids] = np.concatenate([past[1:, ids], logs[None]])
        steps[:, ids] = np.concatenate([steps[1:, ids], np.full((1, len(ids)), step)])
        taken[ids] += 1
        return self._beyond(ids[taken[ids] >= SAMPLES + SETTLES])

    def _beyond(self, ids: Integers) -> list[Finding]:
        if not len(ids):
            return []
        past = self._past.values[:, ids].astype(np.float64)
        low, high = past[:PAST].min(axis=0), past[:PAST].max(axis=0)
        newest = past[-NEWEST:]
        distance = newest.min(axis=0) - high
        shifted = rows_where(distance > np.maximum(WIDTHS * np.maximum(high - low, LEAST_WIDTH), LEAST_SHIFT))
        if len(shifted) > max(1, MOST_AT_ONCE * len(ids)):
            self._forget(ids[shifted])
            return []
        found = []
        for i in shifted.tolist():
            onset, factor = _onset(past[:, i], float(high[i])), newest[:, i].mean() - past[:PAST, i].mean()
            least = LEAST_SHIFT * (1 + YOUNG / int(self._count.values[ids[i]]))
            if distance[i] > least or _leap(past[:, i], onset) > LEAP * factor:
                since = int(self._steps.values[onset, ids[i]])
                found.append(self._finding(int(ids[i]), SHIFT, math.exp(factor), since))
                self._forget(ids[i : i + 1])
        return found

    def _forget(self, ids: Integers | slice) -> None:
        self._count.values[ids] = 0

    def _finding(self, weight: int, kind: str, factor: float, step: int) -> Finding:
        detail = (kind, self.name, "norm", factor, 1.0, SCORE)
        series_id, order = int(self._series.values[weight]), int(self._order.values[weight])
        return Finding(series_id, order, *detail, step=step, last_clean=step - 1, passed_on=False)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the factor, and to what it is relative."""
        if anomaly.kind == UNDERFLOW:
            return f"{subject} is zero at step {anomaly.step}, although its module got an input and a gradient"
        return (
            f"{subject} is {anomaly.value:.3g} times as large since step {anomaly.step} as the inputs and gradients of "
            "its module usually give"
        )


def _onset(past: Floats, high: float) -> int:
    """Return the index of the first of the last samples that all lie above the range."""
    outside = past[PAST:] > high
    return PAST + len(outside) - int(np.argmin(outside[::-1])) if not outside.all() else PAST


def _leap(past: Floats, onset: int) -> float:
    return float(past[onset : onset + BESIDE].mean() - past[onset - BESIDE : onset].mean())


def _is_weight(series: Series) -> bool:
    return series.quantity == GRADIENT and series.name.rpartition(".")[2] == "weight"


def _is_large(layout: Layout) -> bool:
    return layout.numel >= LEAST_ELEMENTS and len(layout.shape) >= LEAST_AXES
