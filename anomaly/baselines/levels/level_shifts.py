"""Finds series that leave the range of their own past for good, from one step on, however narrow that range is."""

import math
import statistics
from dataclasses import replace
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.anomaly import ALL_AT_ONCE, LEVEL_SHIFTS, MEDIAN, SHIFT, SPIKE, SPIKES
from trainsentry.anomaly.baselines.common_changes import ScoredRecord
from trainsentry.anomaly.baselines.levels.early_levels import early_levels
from trainsentry.anomaly.baselines.levels.lone_leaps import lone_leaps
from trainsentry.anomaly.baselines.levels.loss_level import LossLevel
from trainsentry.anomaly.baselines.levels.recent_range import FEWEST, WAIT, RecentRange
from trainsentry.anomaly.baselines.levels.tensor_sizes import TensorSizes
from trainsentry.anomaly.baselines.seen_sizes import SeenSizes
from trainsentry.anomaly.features import FEATURES, SIZES, ZEROS_SLACK, as_statistic
from trainsentry.anomaly.finding import ALL, Finding
from trainsentry.anomaly.rules.data.data_dependence import DataDependence
from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Floats, Mask, SeriesArrays, rows_where
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    GRADIENT,
    Series,
)
from trainsentry.collectors.statistics import VALUE

NARROWEST: Final = (0.05, 0.02, 0.02, 0.1)
NARROWEST_OF_GRADIENT: Final = (0.1, 0.1, 0.02, 0.5)
ZEROS_BELOW_A_RISE: Final = 1.5
ZEROS_ABOVE_A_FALL: Final = 1.0
FEW_ZEROS: Final = math.log((0.1 + ZEROS_SLACK) / (0.9 + ZEROS_SLACK))
"""Least width of a range, by feature in the order of `FEATURES`: 5 % of a largest magnitude, 2 % of a norm, 0.02 of
mean ÷ root mean square, a tenth of the odds of zeros. A range of values that hardly move has no width of its own.
Clipping holds the largest gradient near the bound, however it moves, so that a tenth is asked of it; and of its share
of zeros more, as one of forty units that wakes is as much. A silent unit more is no fault, so a share of zeros must
rise further: from none to a sixth. Nor is one that wakes: a share below a tenth must fall to none from a fifteenth
after a hundred samples, and from a twentieth after a thousand."""

_OF_ACTIVATIONS: Final = (1.2, 1.0, 1.5, 0.7)
_OF_THEIR_GRADIENTS: Final = (2.0, 1.5, np.inf, 0.8)
LEAST: Final = {
    ACTIVATION_INPUT: _OF_ACTIVATIONS,
    ACTIVATION_OUTPUT: _OF_ACTIVATIONS,
    ACTIVATION_GRAD_INPUT: _OF_THEIR_GRADIENTS,
    ACTIVATION_GRAD_OUTPUT: _OF_THEIR_GRADIENTS,
    GRADIENT: (1.5, 1.1, np.inf, 0.8),
}
LEAST_OF_LOSS: Final = 0.5
"""Least distance between the range and the samples beyond it, in widths of the range, by quantity and feature. The mean
of a gradient is not followed: its sign changes as a weight passes its best value. In 107 clean runs, activations came
to 0.74 of their bounds and gradients to 0.84 (`benchmarks/RESULTS.md`)."""

YOUNG: Final = 32
"""Samples after which these bounds are still twice as high: a model that begins to learn changes at once. What is added
falls with the number of samples."""

TIMES_DEPENDENT: Final = 4.0
"""Factor of these bounds where the data of a step depend on those of the step before: three samples are hardly more
than one then. In 36 healthy runs of a policy that four updates teach by each rollout, activations came to 3.5. What
enters modules has no bounds then, and for a while after."""

DEVIATIONS: Final = 4.0
"""Deviations in the width of a range of some 36 normal numbers (Tippett, "On the extreme individuals and the range of
samples taken from a normal population", 1925), which makes a score of a distance."""

MOST_ALONE: Final = 0.5
"""Share of a record's gradients above which it is no tensor that has another level but all of them."""

MOST_APART: Final = 1.5
MOST_ALIKE: Final = 0.9
"""Factor by which gradients may differ from their common change, and the share of them that must keep to it: batches
make a gradient swing by a third. Else they have not changed by one factor, as where clipping gives some what it takes
from others."""

LARGEST_SCORE: Final = 60.0
"""Deviations at most: as strong as a rule whose bound holds for any run."""

_MAX: Final = FEATURES.index("max")
_NORM: Final = FEATURES.index("norm")
_ZEROS: Final = FEATURES.index("zeros")

_Beyond = tuple[int, float, float]
"""How a series is beyond its range: the feature, its middle before, and the score."""

TIMES_OTHERS: Final = 2.0
MOST_COMMON_FALL: Final = math.log(8)
"""A gradient has fallen with the others where it fell by less than so many times what the middle one did, in logs,
and that one by less than this factor: a lower bound of clipping is a half or a quarter of the old one."""

OTHER_SIZE: Final = math.log(1.5)
"""Factor by which another batch may be larger or smaller than the one that was given until then."""


_FORWARD: Final = frozenset({ACTIVATION_INPUT, ACTIVATION_OUTPUT, "loss"})


class LevelShifts:
    """Follows the range of each feature of activations, their gradients, weights' gradients and the loss.

    A series whose last three samples all lie beyond the range of those before, on one side and by that range's width,
    has another level: the module computes something else, or gets something else. Noise does not matter, as the range
    is the series' own: a share of zeros that was a thousandth is a quarter, a norm that swings by 2 % is a tenth lower.
    Of normal, independent samples, three lie so far out in one of many million cases. (Tests by how many of the new
    samples exceed all old ones: Nelson, "Tables for a precedence life test", Technometrics 5, 1963.)

    `data_is_renewed` says whether the last record told that one batch, which the model had always been given, has
    given way to another. Left out are weights, updates and optimizer state, which add up what happened, and the fall of
    a loss.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        series, features = arrays.series, len(FEATURES)
        self._table = arrays.table
        self._narrowest = series.column(np.float32, of=_narrowest, shape=(features,))
        self._least_rise = series.column(np.float32, of=_least_rises, shape=(features,))
        self._least_fall = series.column(np.float32, of=_least_falls, shape=(features,))
        self._is_followed = series.column(bool, of=lambda s: bool(np.isfinite(_least_rises(s)).any()))
        self._is_input = series.column(bool, of=lambda s: s.is_model_input)
        self._enters = series.column(bool, of=lambda s: s.quantity == ACTIVATION_INPUT)
        self._is_gradient = series.column(bool, of=lambda s: s.quantity == GRADIENT)
        self._is_forward = series.column(bool, of=_is_forward)
        self.data_is_renewed = False
        self._range, self._data = RecentRange(arrays), arrays.shared(DataDependence)
        self._seen = arrays.shared(SeenSizes)
        self._divisors = series.column(np.float32, 1.0)
        self._sizes = TensorSizes(arrays)

    def reset(self, ids: Any) -> None:
        """Forget the past of series."""
        self._range.reset(ids)

    def judge(
        self,
        observed: Observed,
        scored: ScoredRecord,
        divisors: Floats,
        rejected: Mask,
        loss: LossLevel,
    ) -> list[Finding]:
        """Return the series that have left their range, by their first sample beyond it; take in the record.

        `divisors` are the known factors in the sizes of rows, shape (n,); no row of the mask `rejected` is taken in.
        `loss` knows which rises the run has seen before, and whether the loss is worse.
        """
        record, self.data_is_renewed = observed.record, False
        is_taken = self._is_followed.values[record.where] & ~rejected & ~observed.excused
        if self._data.is_gathered:  # each rollout of a policy makes another level of what layers compute
            is_taken &= ~observed.facts.activation[record.where]
        if (without := self._without_level(observed)).any():
            self.reset(record.ids[without])
            is_taken &= ~without
        rows = rows_where(is_taken & ~np.isnan(scored.features[0]))
        if not len(rows):
            return []
        ids, features = record.ids[rows], scored.features[:, rows]
        if scored.floor is not None:  # what is nothing but rounding has no size
            features[:SIZES][features[:SIZES] <= scored.floor[:, rows]] = np.nan
        if (resized := self._sizes.take_in(ids, observed.numel[rows])).any():
            self.reset(ids[resized])
        self._range.take_in(ids, features, record.step)
        self._divisors.values[ids] = divisors[rows]
        told = [*self._lone_leaps(observed, ids, rows, scored.floor), *self._early(observed, ids, rows, loss)]
        places = self._range.outside(ids)
        self.data_is_renewed = self._is_renewed(ids, places)
        if self.data_is_renewed:  # the same batch again and again, which a program takes for a while, and then another
            self.reset(slice(None))
            return told
        if not len(places):
            return told
        found = self._apart(ids, places, self._beyond(ids[places]))
        findings = [self._shift(observed, int(rows[places[i]]), found[i]) for i in sorted(found)]
        usual = [loss.is_usual(f) or self._data.begins_rollout(f.step) or self._seen.within[f.row] for f in findings]
        findings = [f for f, is_usual in zip(findings, usual, strict=True) if not is_usual]
        self.reset(ids[places[list(found)]])
        left = _together(_placed(findings, observed), observed, int(self._is_gradient.values[ids].sum()))
        return told + [finding for finding in left if finding.row not in {each.row for each in told}]

    def _early(self, observed: Observed, ids: Any, rows: Any, loss: LossLevel) -> list[Finding]:
        """Return the activations that are far beyond the few samples known of them, by the first one beyond."""
        is_dependent = self._data.was_high()
        followed = self._is_forward.values[ids] & ~(is_dependent & self._enters.values[ids])
        if not followed.any():
            return []
        times = TIMES_DEPENDENT if is_dependent else 1.0
        narrowest = self._narrowest.values[:, ids]
        found = early_levels(self._range, ids, followed, narrowest, loss.is_worse_since, times)
        findings = []
        for place, (feature, middle, apart, first) in found.items():
            beyond = feature, middle, min(DEVIATIONS * (0.5 + apart), LARGEST_SCORE)
            findings.append(self._shift(observed, int(rows[place]), beyond, first))
        self.reset(ids[list(found)])
        return _placed(findings, observed)

    def _is_renewed(self, ids: Any, places: Any) -> bool:
        """Whether all inputs of the model were one batch until now, and have given way to one of nearly their size."""
        if not self._is_input.values[ids[places]].any():
            return False
        given = ids[self._is_input.values[ids] & (self._range.taken[ids] >= FEWEST + WAIT)]
        is_one = self._range.is_constant(given).all()
        return bool(is_one and not (np.abs(self._range.moved(given)[:SIZES]) > OTHER_SIZE).any())

    def _lone_leaps(self, observed: Observed, ids: Any, rows: Any, floor: Floats | None) -> list[Finding]:
        """Return the gradients that are larger at once than all their recent ones, where the others are calm."""
        gradients = rows_where(self._is_gradient.values[ids] & (self._range.taken[ids] >= FEWEST + WAIT))
        if not len(gradients):
            return []
        of = rows[gradients]
        leaps = lone_leaps(self._range, ids[gradients], None if floor is None else floor[_NORM, of])
        return [self._leap(observed, int(of[i]), leap) for i, leap in leaps.items() if not self._seen.familiar[of[i]]]

    def _leap(self, observed: Observed, row: int, leap: float) -> Finding:
        """Return the finding of a gradient that leaps at this step."""
        series_id = int(observed.record.ids[row])
        low, high = (float(bound[_NORM, series_id]) for bound in (self._range.low, self._range.high))
        score = min(DEVIATIONS * leap / max(high - low, NARROWEST_OF_GRADIENT[_NORM]), LARGEST_SCORE)
        sample = float(self._range.newest[-1, _NORM, series_id])
        return self._finding(observed, row, (_NORM, (low + high) / 2, score), sample, kind=SPIKE, detector=SPIKES)

    def _without_level(self, observed: Observed) -> Mask:
        """Return which rows are of losses that are not positive, or change their sign: their size is no level."""
        record = observed.record
        scalar = observed.facts.scalar[record.where] & self._is_followed.values[record.where]
        found: Mask = scalar & ~(observed.judged & (record.columns[VALUE] > 0))
        return found

    def _apart(self, ids: Any, places: Any, found: dict[int, _Beyond]) -> dict[int, _Beyond]:
        """Leave out the gradients that have fallen with the others, where these are a part of them.

        A lower bound of clipping, or a loss that falls, makes all gradients smaller, and a few leave their ranges
        first.
        """
        odd = [i for i in found if self._is_gradient.values[ids[places[i]]]]
        followed = ids[self._is_gradient.values[ids] & (self._range.taken[ids] >= FEWEST + WAIT)]
        if not odd or len(odd) > MOST_ALONE * len(followed):
            return found
        own, others = self._range.moved(ids[places]), self._range.moved(followed)
        fell = set()
        for i in odd:
            feature = found[i][0]
            known = others[feature][np.isfinite(others[feature])]
            common = float(np.median(known)) if len(known) else 0.0
            if feature < SIZES and common > -MOST_COMMON_FALL and TIMES_OTHERS * common < own[feature, i] < 0:
                fell.add(i)
        return {i: beyond for i, beyond in found.items() if i not in fell}

    def _beyond(self, ids: Any) -> dict[int, _Beyond]:
        """Return the places in `ids` of those far beyond their range."""
        low, high, newest = self._range.low[:, ids], self._range.high[:, ids], self._range.newest[:, :, ids]
        width = np.maximum(high - low, self._narrowest.values[:, ids])
        with np.errstate(invalid="ignore"):
            few = low[_ZEROS] < FEW_ZEROS
            width[_ZEROS, few] = np.maximum(width[_ZEROS, few], ZEROS_ABOVE_A_FALL)
            fall = (low - newest.max(axis=0)) / width
            width[_ZEROS] = np.maximum(width[_ZEROS], ZEROS_BELOW_A_RISE)
            rise = (newest.min(axis=0) - high) / width
        if self._data.is_high:  # a critic's gradient falls as another part of a clipped one grows
            fall[:SIZES, self._is_gradient.values[ids]] = 0.0
        reach = self._reach(ids, rise, fall)
        found = {}
        for i in rows_where(reach.max(axis=0) >= 1).tolist():
            feature = int(np.where(reach[:, i] >= 1, np.fmax(rise[:, i], fall[:, i]), 0.0).argmax())
            distance = max(float(rise[feature, i]), float(fall[feature, i]))
            middle = float(low[feature, i] + high[feature, i]) / 2
            found[i] = feature, middle, DEVIATIONS * (0.5 + distance)
        return found

    def _reach(self, ids: Any, rise: Floats, fall: Floats) -> Floats:
        """Return distances in widths as multiples of their bounds, shape (features, n): from 1 on another level."""
        with np.errstate(invalid="ignore"):
            reach = np.fmax(rise / self._least_rise.values[:, ids], fall / self._least_fall.values[:, ids])
        of_age: Floats = np.nan_to_num(reach, posinf=0.0, neginf=0.0) / (1 + YOUNG / self._range.taken[ids])
        if self._data.was_high():  # what enters follows from what was done before
            of_age[:, self._enters.values[ids]] = 0.0
        if self._data.is_high:  # extremes are those of episodes: a pole that does not fall leans less
            of_age /= TIMES_DEPENDENT
            of_age[_MAX] = 0.0
        return of_age

    def _shift(self, observed: Observed, row: int, beyond: _Beyond, first: int = 0) -> Finding:
        """Return the finding of a series that has another level, by its first newest sample beyond its range."""
        series_id = int(observed.record.ids[row])
        last_clean, onset = (int(step) for step in self._range.steps[first : first + 2, series_id])
        sample = float(self._range.newest[first, beyond[0], series_id])
        shift = self._finding(observed, row, beyond, sample, kind=SHIFT, detector=LEVEL_SHIFTS)
        return replace(shift, step=onset, last_clean=last_clean)

    def _finding(
        self, observed: Observed, row: int, beyond: _Beyond, sample: float, *, kind: str, detector: str
    ) -> Finding:
        series_id, numel = int(observed.record.ids[row]), float(observed.numel[row])
        (feature, before, score), divisor = beyond, float(self._divisors.values[series_id])
        return Finding(
            series_id=series_id,
            row=row,
            kind=kind,
            detector=detector,
            statistic=FEATURES[feature],
            value=as_statistic(feature, sample, numel, divisor),
            expected=as_statistic(feature, before, numel, divisor),
            score=score,
        )

    def saved(self, size: int) -> dict[str, Any]:
        """Return the ranges of the first `size` series as plain data."""
        numel = np.stack(self._sizes.of(slice(size)), axis=1).tolist()
        return {**self._range.saved(size), "numel": numel}

    def adopt(self, series_id: int, saved: dict[str, Any], position: int) -> None:
        """Restore a series from `position` of the saved ones."""
        self._range.adopt(series_id, saved, position)
        self._sizes.adopt(series_id, *saved["numel"][position])


def _placed(findings: list[Finding], observed: Observed) -> list[Finding]:
    """Say which findings are passed on, in the order of their rows: all but the first, if any, of the forward pass.

    An output of one element is a loss that the model returns: where it is logged too, it has that name.
    """
    series = [observed.table.series[f.series_id] for f in findings]
    forward = [i for i, s in enumerate(series) if s.quantity in _FORWARD]
    whole = [i for i in forward if series[i].scalar or observed.numel[findings[i].row] > 1]
    first = (whole or forward or [0])[0]
    return [replace(f, passed_on=i != first) for i, f in enumerate(findings)]


def _together(findings: list[Finding], observed: Observed, gradients: int) -> list[Finding]:
    """Make one finding of most of a record's gradients, of which it holds so many."""
    of_size = [f for f in findings if observed.table.series[f.series_id].quantity == GRADIENT and _is_of_size(f)]
    if len(of_size) <= max(MOST_ALONE * gradients, 1):
        return findings
    factors = [f.value / f.expected for f in of_size]
    factor = statistics.median(factors)
    alike = sum(1 / MOST_APART < each / factor < MOST_APART for each in factors) >= MOST_ALIKE * len(factors)
    passed_on = all(f.passed_on for f in of_size)
    first = replace(
        of_size[0], detector=ALL_AT_ONCE, statistic="norm" if alike else MEDIAN, value=factor, expected=1.0, name=ALL
    )
    first = replace(first, passed_on=passed_on)
    told = {f.series_id for f in of_size[1:]}
    return [first if f is of_size[0] else f for f in findings if f.series_id not in told]


def _is_of_size(finding: Finding) -> bool:
    """Whether a finding is of a size that has a quotient: a share of zeros may fall to none."""
    return finding.statistic in FEATURES[:SIZES] and finding.expected > 0 and finding.value > 0


def _is_forward(series: Series) -> bool:
    """Whether a series enters or leaves a module; the model's own inputs have more samples, and a test of their own."""
    return series.quantity in _FORWARD and not series.scalar and not series.is_model_input


def _narrowest(series: Series) -> Any:
    """Return the least width of each feature's range, shape (features,)."""
    return np.array(NARROWEST_OF_GRADIENT if series.quantity == GRADIENT else NARROWEST)


def _least_rises(series: Series) -> Any:
    """Return the least rise of each feature, in widths, shape (features,): infinite where it is not followed."""
    if series.scalar:
        return np.array([LEAST_OF_LOSS if series.name == "loss" else np.inf, *[np.inf] * (len(FEATURES) - 1)])
    makes_weight = ".parametrizations." in f".{series.module}"  # as of a spectral norm: what it gives adds up updates
    return np.array(LEAST.get("" if makes_weight else series.quantity, [np.inf] * len(FEATURES)))


def _least_falls(series: Series) -> Any:
    """Return the same for a fall: that of the loss is the purpose of training."""
    return np.full(len(FEATURES), np.inf) if series.scalar else _least_rises(series)
