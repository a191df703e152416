"""A weight that moved further between two samples than its optimizer's updates can have moved it."""

import math
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.optimizer.recorded_options import ByParameter, ParameterNumbers, RecordedOptions
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, SeriesArrays, rows_where
from trainsentry.collectors.series import GRADIENT, OPTION, PARAMETER, Series
from trainsentry.collectors.statistics import MAX, MIN, NORM

SCORE: Final = 70.0
"""Deviations: above every spike of healthy runs, below the rules that compare bits or sums exactly."""

HELD_FOR: Final = 3
"""Distances between samples that must have stayed within the bound before one counts: some loops clip, average or
rescale weights, and the momentum from before the first step is unknown."""

LONGER: Final = 8
"""Factor on `HELD_FOR` after each distance beyond the bound: what comes back is the loop's own doing."""

SLACK: Final = 1.5
"""Multiple of the bound that counts: bounds hold in exact arithmetic, for gradients as they were read."""

LEAST_SHARE: Final = 0.05
LEAST_SHARE_FLOAT32: Final = 0.02
"""Least distance that counts, as a share of the weight's size before: weights in bfloat16 are rounded to 1 in 256, at
each update. In float32 a shorter one counts where it is `LEAPS` times every distance of that weight before."""

LEAPS: Final = 4.0
"""An optimizer of one's own may move weights by more than the bound of the one that it is made from, and by about as
much at each step."""

_WORDS: Final = {"norm": "norm", "min": "least element", "max": "largest element"}

_OF_ADAM: Final = {"lr", "betas.0", "betas.1", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "maximize"}
_OF_TORCH: Final = {"foreach", "capturable", "differentiable", "fused", "momentum_decay", "bias_correction", "step"}
_OF_SCHEDULES: Final = {
    *("initial_lr", "base_lr", "max_lr", "min_lr", "swa_lr", "lr_scale", "lr_mult", "lr_multiplier"),
    *("base_momentum", "max_momentum"),
}
_OF_MEGATRON: Final = {"wd_mult", "pre_wd_mult", "pre_lr_mult", "is_expert_parallel", "is_decoupled_lr"}
_OF_USERS: Final = {"wd_scale", "layer_id", "group_id", "default_config", "is_vision_model_param"}
_KNOWN: Final = frozenset(_OF_ADAM | _OF_TORCH | _OF_SCHEDULES | _OF_MEGATRON | _OF_USERS)
"""Options of Adam and its kind, and those that schedules add. An optimizer with others scales or turns its updates
otherwise: LAMB by the weight's size, SOAP into another basis, AdEMAMix by a second average."""

_PRECISE: Final = frozenset({"float32", "float64"})

_Sizes = Floats
"""Shape (2, n): what is followed of a weight and of its gradient, the root mean square and the largest magnitude."""


class DisplacementRule(Rule):
    """Bounds how far the updates since the last sample can have moved each weight, from options and gradients.

    By the triangle inequality a norm changes by at most the sum of the norms of the updates; the least and the largest
    element move by at most the sum of their largest elements, so that a sign which flips shows. An update of Adam and
    its kind is at most the rate times (1 − β₁) / √(1 − β₂), or the rate, an element (Kingma and Ba, "Adam", 2015,
    section 2.1). One of SGD is the rate times its momentum, a sum of gradients, which are sampled at every step. Decay
    adds the rate times the decay times the weight. With other optimizers nothing is judged, nor where a group has
    options that these have not.

    Several weights at once are somebody's intention, as in `WeightContinuityRule`, which is exact but needs weights and
    updates at every step.
    """

    name: ClassVar[str] = "displacement"
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT, PARAMETER, OPTION})
    statistics: ClassVar[frozenset[str]] = frozenset({"norm", "min", "max"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._owners = ParameterNumbers()
        self._gradient_of = arrays.series.column(np.int64, -1, of=lambda s: self._owner(s, GRADIENT))
        self._weight_of = arrays.series.column(np.int64, -1, of=lambda s: self._owner(s, PARAMETER))
        self._is_rounded = arrays.layouts.column(bool, of=lambda layout: layout.dtype not in _PRECISE)
        self._options = RecordedOptions(arrays)
        self._gradient, self._momentum = ByParameter(2), ByParameter(2)
        self._weight, self._bound, self._longest = ByParameter(2), ByParameter(2), ByParameter(2)
        self._extremes = ByParameter(2)
        self._held, self._needed, self._trains = ByParameter(1), ByParameter(1), ByParameter(1)
        self._read_at = -1
        self._step = -1
        self._has_gradients = self._skipped = self._again = False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the weight that moved too far; a step may come in several records."""
        record = observed.record
        if record.step != self._step:
            self._add_updates(record.step)
            self._step, self._has_gradients, self._skipped, self._again = record.step, False, False, False
        self._options.note(observed)
        self._skipped |= self._options.skips(observed)
        self._again |= self._options.updates_again(observed)
        self._note_gradients(observed)
        if not any(self._options.groups()):
            return []
        rows = rows_where(self._weight_of.values[record.where] >= 0)
        return self._compare(observed, rows) if len(rows) else []

    def _note_gradients(self, observed: Observed) -> None:
        """Note which weights have gradients, and the sizes of these, which bound the updates of SGD."""
        rows = rows_where(self._gradient_of.values[observed.record.where] >= 0)
        if not len(rows):
            return
        self._has_gradients = True
        owners = self._gradient_of.values[observed.record.ids[rows]]
        self._trains.set(owners, np.ones((1, len(owners))))
        if self._options.linear_groups():
            self._gradient.set(owners, _sizes(observed, rows))

    def _compare(self, observed: Observed, rows: Integers) -> list[Finding]:
        """Compare weights with their last sample, and begin to add up their updates anew."""
        owners = self._weight_of.values[observed.record.ids[rows]]
        now, before, bound = _sizes(observed, rows), self._weight.get(owners), self._bound.get(owners)
        extremes, were = observed.record.columns[[MIN, MAX]][:, rows], self._extremes.get(owners)
        apart = np.abs(extremes - were)
        moved = np.stack((np.abs(now[0] - before[0]), apart.max(axis=0)))
        trains = self._trains.get(owners) == 1  # copies of other weights move by no gradient of theirs
        known = np.isfinite(moved) & np.isfinite(bound) & trains
        is_rounded, longest = self._is_rounded.values[observed.record.layouts[rows]], self._longest.get(owners)
        leaps = ~is_rounded & (moved > LEAPS * np.nan_to_num(longest, nan=np.inf))
        least = np.where(leaps, LEAST_SHARE_FLOAT32, LEAST_SHARE)
        self._longest.set(owners, np.fmax(longest, moved))
        beyond = known & (moved > np.maximum(SLACK * bound, least * before))
        broken, whole = beyond.any(axis=0), known.all(axis=0)
        held, needed = np.nan_to_num(self._held.get(owners)[0]), np.fmax(self._needed.get(owners)[0], HELD_FOR)
        odd = broken & (held >= needed)
        needed[odd] *= LONGER
        held = np.where(broken, 0, held + whole)
        self._held.set(owners, held[None])
        self._needed.set(owners, needed[None])
        self._weight.set(owners, now)
        self._extremes.set(owners, extremes)
        self._bound.set(owners, np.zeros_like(now))
        last, self._read_at = self._read_at, self._step
        if broken.sum() != 1 or not odd.any():
            return []
        place = int(rows_where(odd)[0])
        unit = math.sqrt(observed.numel[rows[place]])
        of_norm = "norm", float(now[0, place]) * unit, float(before[0, place]) * unit
        end = int(apart[:, place].argmax())
        of_end = ("min", "max")[end], float(extremes[end, place]), float(were[end, place])
        series_id, row = int(observed.record.ids[rows[place]]), int(rows[place])
        detail = of_norm if beyond[0, place] else of_end
        return [Finding(series_id, row, SHIFT, self.name, *detail, SCORE, last_clean=last)]

    def _add_updates(self, step: int) -> None:
        """Add the bound of the updates from the step before to all weights; of steps without a record none is known."""
        if self._step < 0 or (self._skipped and not self._options.several):
            return
        for by_parameter in (self._gradient, self._momentum, self._weight, self._bound, self._longest):
            by_parameter.grow(len(self._owners))
        self._add_to_momentum()
        bounds = [self._bound_of(group) for group in self._options.groups()]
        most = np.maximum.reduce(bounds) if bounds else np.array(np.nan)
        known = step == self._step + 1 and not (self._skipped or self._again)
        self._bound.values += most if known else np.nan

    def _add_to_momentum(self) -> None:
        """Add the step's gradients to the bound of the momentum, which is that of the group with the largest."""
        groups = self._options.linear_groups()
        if groups and self._has_gradients:
            decay = max(group.get("weight_decay", 0.0) for group in groups) * np.nan_to_num(self._weight.values)
            kept = max(group["momentum"] for group in groups) * np.nan_to_num(self._momentum.values)
            self._momentum.values[:] = kept + np.nan_to_num(self._gradient.values) + decay

    def _bound_of(self, group: dict[str, float]) -> _Sizes:
        """Return the bound of one update by a group of parameters, for all parameters; NaN where there is none."""
        rate, weight = group["lr"], np.nan_to_num(self._weight.values)
        decay = group.get("weight_decay", 0.0) * weight
        if "betas.0" in group and group.keys() - _KNOWN:
            return np.full_like(weight, np.nan)
        if "betas.0" in group:
            spread = math.sqrt(max(1 - group.get("betas.1", 1.0), 0.0))
            largest = max(1.0, (1 - group["betas.0"]) / spread) if spread else math.nan
            of_adam: _Sizes = rate * (largest + decay)
            return of_adam
        if group not in self._options.linear_groups() or not self._has_gradients:
            return np.full_like(weight, np.nan)
        found: _Sizes = rate * self._momentum.values * (1 + group.get("nesterov", 0.0) * group["momentum"])
        return found

    def _owner(self, series: Series, quantity: str) -> int:
        return self._owners.of(series) if series.quantity == quantity and not series.micro_step else -1

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return both sizes, and that the updates cannot have made the difference."""
        size = f"the {_WORDS[anomaly.statistic]} of {subject} is {anomaly.value:.4g} at step {anomaly.step}"
        before = f"{anomaly.expected:.4g} at step {anomaly.last_clean}"
        return f"{size}, {before}: the optimizer's updates cannot have moved it so far"


def _sizes(observed: Observed, rows: Integers) -> _Sizes:
    """Return the root mean square and the largest magnitude of some rows, shape (2, n)."""
    columns = observed.record.columns
    root = columns[NORM, rows] / np.sqrt(np.maximum(observed.numel[rows], 1.0))
    sizes: _Sizes = np.stack((root, np.maximum(np.abs(columns[MIN, rows]), np.abs(columns[MAX, rows]))))
    return sizes
