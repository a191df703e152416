"""Scores rows against the baselines of their series, and gives the p-value of the whole record."""

import statistics
from collections import deque
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.baselines.baseline import GROUP_WEIGHT, LEAST_SCALE, LOCATION, NEWEST, SCALE, UP, Baseline
from trainsentry.anomaly.baselines.common_changes import CommonChanges, ScoredRecord, shared
from trainsentry.anomaly.baselines.learned_loss import LearnedLoss
from trainsentry.anomaly.baselines.negligible import Negligible
from trainsentry.anomaly.baselines.row_scores import OUTLIER, drift_scores, least_drifts, spike_scores
from trainsentry.anomaly.baselines.score_tail import LOWEST, OF_DRIFTS, OF_SCALARS, OF_TENSORS, ScoreTail
from trainsentry.anomaly.baselines.series_groups import SCALARS, GroupRows, RowsByGroup, SeriesGroups
from trainsentry.anomaly.baselines.step_noise import StepNoise
from trainsentry.anomaly.features import FEATURES, MAX_FEATURE, MEAN_FEATURE, SIZES, features_of
from trainsentry.anomaly.series_arrays import Floats, SeriesArrays, medians, rows_where
from trainsentry.collectors.series import ACTIVATION_INPUT, UPDATE

WARM_UP: Final = 5
"""Samples before a series is judged: the fewest for a centre and a deviation."""

FEW_ELEMENTS: Final = 0.7
"""Deviation of the log size of one normal number, divided by the square root of the number of elements: added to every
tensor's own, so that a bias of four elements may vanish once."""

GROWN: Final = 64
"""Samples after which a series' own deviation is used alone, without that of its group."""

MEANS_AFTER: Final = 32
"""Records before the mean of what a model computes, or of its weights, counts: as it begins to learn it gives outputs
and biases another sign. The output of a wide net had one at step 16."""

LARGEST_OF_ADAM: Final = 1.2
USUAL_OF_ADAM: Final = -2.3
"""Log of the largest element of an update, over the learning rate, up to which only its norm is judged, where it is
usually above a tenth: Adam answers the first gradient of a unit that had none for long by (1 − β₁) / √(1 − β₂), which
is 3.2 (Kingma and Ba, "Adam", 2015, section 2.1). Updates of SGD, which are gradients, are smaller."""

DRIFT_WARM_UP: Final = 40
"""Samples before a drift counts: a young model drifts everywhere."""

LOSS_REMEMBERED: Final = 32
"""Records for which the fall of the loss is remembered: many loops log it now and then."""

FALLS: Final = 8
LEARNS: Final = 3.0
MOST_LEARNT: Final = 2.3
LEAVES: Final = 1.0
PLATEAU: Final = 0.7
"""Newest losses whose middle fall, times this, lets sizes rise in addition while they drift, up to tenfold: as a model
begins to learn, its loss falls less than what it is computed from grows. The outputs of a vision transformer grew
elevenfold over 40 steps while its loss fell by a third, and those of a denoiser as much while it fell by a quarter.
Where a loss leaves the plateau of a guess, the first falls are small, but far beyond its swings: as its middle one goes
from one to two of its deviations below, sizes may come to rise by a factor of two in addition. The cells of a recurrent
net grew sevenfold over 20 steps while its loss fell by a twentieth, three of its deviations."""

TIMES_MOVED: Final = 2.0
MOVES_FADE: Final = 0.97
"""Multiple of the largest recent move of a mean between two samples that a jump of its sign takes, and the share of
that move which is left with each sample."""

WEIGHTS: Final = {SCALARS: 0.2, ACTIVATION_INPUT: 0.1}
WEIGHT_OF_COMMON: Final = 0.1
"""Shares of the allowed false alarms for logged scalars, for the data, and for common changes: these are few series.
The other groups share the rest."""


class Scoring:
    """Scores records by the past of their series."""

    def __init__(self, arrays: SeriesArrays) -> None:
        self.groups = SeriesGroups(arrays)
        self.rows = RowsByGroup(self.groups)
        self._negligible = Negligible(self.groups, arrays)
        self.baseline = Baseline(arrays.series)
        self.step_noise = StepNoise()
        self.learned_loss = LearnedLoss()
        self._fallen_since_start = 0.0
        self._records = 0
        self._last_fallen = 0.0, 0
        self._falls: deque[tuple[float, float]] = deque(maxlen=FALLS)
        self._is_update = arrays.series.column(bool, of=lambda s: s.quantity == UPDATE)
        self._mean_moves = arrays.series.column(np.float32)
        self._spikes: dict[int, ScoreTail] = {}
        self._drifts: dict[int, ScoreTail] = {}
        self.common = CommonChanges(self.groups)

    def score(
        self, ids: Any, columns: Floats, numel: Floats, scalar: Any, divisor: Floats, judged: Any
    ) -> ScoredRecord:
        """Return the scores of rows; `judged` masks those that may be called abnormal."""
        self._records += 1
        self.groups.columns.grow()
        self._negligible.refresh(self.baseline)
        self._last_fallen = self._last_fallen[0], self._last_fallen[1] - 1
        rows = self.rows.of(ids)
        ids, group = rows.where, rows.group
        features = features_of(columns, numel, scalar, divisor)
        state = self.baseline.state[:, :, ids]
        held = self.baseline.count[ids]
        location, newest = state[LOCATION], state[NEWEST]
        unit = self._unit(rows, state, held)
        unit[:SIZES] += np.where(scalar, 0.0, FEW_ELEMENTS / np.sqrt(np.maximum(numel, 1.0)))
        distance, jump = features - location, features - newest
        unknown = rows_where(np.isnan(distance) | (held < WARM_UP))
        distance.flat[unknown] = jump.flat[unknown] = 0.0
        learned = self._learned(rows.ids, location[0], features[0])
        common, common_distance, common_jump = self.common.judge(
            rows, distance, jump, self._fallen(ids, distance), self._fallen_since_start
        )
        floor = self._negligible.floor(ids, group)
        distance[:SIZES] = _away(features, location, shared(common_distance, distance, group), floor)
        jump[:SIZES] = _away(features, newest, shared(common_jump, jump, group), floor)
        moved = _moved_mean(features, newest, location)
        jump[MEAN_FEATURE] = np.sign(jump[MEAN_FEATURE]) * np.fmin(np.abs(jump[MEAN_FEATURE]), moved)
        within = self._is_update.values[ids] & (features[MAX_FEATURE] <= LARGEST_OF_ADAM)
        within &= location[MAX_FEATURE] >= USUAL_OF_ADAM
        distance[MAX_FEATURE, within] = jump[MAX_FEATURE, within] = 0.0
        jump[MEAN_FEATURE, moved <= TIMES_MOVED * self._mean_moves.values[ids]] = 0.0
        distance.flat[unknown] = jump.flat[unknown] = 0.0
        score, best = self._spikes_of(rows, distance, jump, unit, scalar, learned)
        learns = self._learns(ids, state, distance, judged)
        drift = self._drift(ids, state, distance, unit, scalar, learned, learns)
        found = ScoredRecord(
            features=features,
            floor=floor,
            state=state,
            score=score,
            feature=best,
            distance=distance,
            p=np.ones(len(group)),
            drift=drift,
            drift_p=np.ones(len(group)),
            common=common,
        )
        found.p_all = self._combine(found, rows, judged)
        return found

    def learn(self, ids: Any, found: ScoredRecord, healthy: Any, step: int) -> None:
        """Learn the healthy rows into their baselines; rows that are far out count as outliers."""
        far = found.score > OUTLIER
        known = ~np.isnan(found.features).all(axis=0)
        take = healthy & ~far & known
        self._learn_step_noise(ids, found, take)
        moved = _moved_mean(found.features, found.state[NEWEST], found.state[LOCATION])
        moved = np.where(take & np.isfinite(moved), moved, 0.0)
        self._mean_moves.values[ids] = np.maximum(MOVES_FADE * self._mean_moves.values[ids], moved)
        where = self.rows.of(ids).where
        if isinstance(where, slice):  # found.state is the baseline's own
            left_out = ids[~take]
            kept = self.baseline.copy_of(left_out)
            self.baseline.learn(where, found.state, found.features, step)
            self.baseline.put_back(left_out, kept)
        else:
            self.baseline.state[UP:, :, ids] = found.state[UP:]
            self.baseline.learn(ids[take], found.state[:, :, take], found.features[:, take], step)
        self.baseline.last_clean[ids[healthy & ~known]] = step
        self.baseline.note_outliers(ids[healthy & far])

    def _learn_step_noise(self, ids: Any, found: ScoredRecord, take: Any) -> None:
        rows = rows_where(take & (self.groups.of[ids] == self.groups.number(SCALARS)))
        jump = found.features[0, rows] - found.state[NEWEST, 0, rows]
        known = np.isfinite(jump) & (self.baseline.count[ids[rows]] > 0)
        self.step_noise.learn(ids[rows[known]].tolist(), jump[known])

    def learn_tails(self, ids: Any, found: ScoredRecord, judged: Any, weight: float = 1.0) -> None:
        """Learn the scores of a record without an alarm as healthy ones; each counts for `weight` samples."""
        for number, rows in self.rows.of(ids).among(judged):
            self._spike_tail(number).learn(found.score[rows], weight)
            self._drift_tail(number).learn(found.drift[rows], weight)
        self.common.learn_tail(found.common, weight)

    def reset_drift(self, ids: Any) -> None:
        """Set the cumulative sums of series that were reported back to zero."""
        self.baseline.state[UP:, :, ids] = 0.0

    def expect_change(self) -> None:
        """Take the next sample of every series as its level, after a declared change."""
        self.baseline.reset(slice(None))
        self.common.expect_change()

    def _unit(self, rows: GroupRows, state: Floats, held: Any) -> Floats:
        """Return one deviation of each feature: the series' own, drawn towards that of its group while it is young."""
        ids, floor = rows.where, self.groups.floor[:, rows.where]
        unit: Floats = np.maximum(state[SCALE], floor)
        young = held < GROWN
        if young.any():
            logs = np.log(unit)
            of_group = np.zeros((len(FEATURES), len(self.groups.names)))
            old = held >= WARM_UP
            for number, of in rows.among(old):
                of_group[:, number] = medians(logs[:, of])
            weight = held / (held + GROUP_WEIGHT)
            drawn = np.exp(weight * logs + (1 - weight) * np.maximum(of_group[:, rows.group], np.log(floor)))
            np.copyto(unit, np.maximum(drawn, floor), where=young)
        unit += self.groups.young[ids] / np.maximum(held, 1)
        return unit

    def _spikes_of(
        self, of: GroupRows, distance: Floats, jump: Floats, unit: Floats, scalar: Any, learned: Floats
    ) -> tuple[Floats, Any]:
        """Return the scores of spikes; a scalar that rises is measured by its step noise, where that is smaller."""
        ids, where = of.ids, of.where
        least_fall = self.groups.least_fall[where] + self._fallen(where, distance) * self.groups.falls_with_loss[where]
        least_fall[learned > 0] = np.inf
        losses = rows_where(self.groups.is_loss[ids])
        if len(losses):
            self._let_fall(ids[losses], losses, least_fall)
        rows = rows_where(scalar & (distance[0] > 0))
        kept = unit[:SIZES, rows]
        own = np.maximum(self.step_noise.deviations(ids[rows].tolist()), self.groups.floor[0, ids[rows]])
        own += self.groups.young[ids[rows]] / np.maximum(self.baseline.count[ids[rows]], 1)
        unit[:SIZES, rows] = np.minimum(kept, own)
        least = self.groups.jump[:, where] + learned
        if self._records <= MEANS_AFTER:
            least[MEAN_FEATURE, ~self.groups.is_model_input[where]] = np.inf
        found = spike_scores(distance, jump, unit, least, least_fall)
        unit[:SIZES, rows] = kept
        return found

    def _learned(self, ids: Any, usual: Floats, size: Floats) -> Floats:
        """Return how far the usual loss is below the level at which a loss tells of the training, shape (n,)."""
        below: Floats = np.zeros(len(ids), np.float32)
        losses = rows_where(self.groups.is_loss[ids])
        if len(losses):
            which = ids[losses].tolist()
            below[losses] = self.learned_loss.below(which, usual[losses])
            self._fallen_since_start = self.learned_loss.fallen(which, usual[losses])
            self.learned_loss.note(which, size[losses], usual[losses], below[losses])
        return below

    def _let_fall(self, ids: Any, losses: Any, least_fall: Floats) -> None:
        """Let losses fall as far as they swing lately."""
        usual = self.baseline.state[LOCATION, 0, ids]
        fall = usual - self.learned_loss.least(ids.tolist())
        least_fall[losses] = np.fmax(least_fall[losses], fall)

    def _drift(
        self, ids: Any, state: Floats, distance: Floats, unit: Floats, scalar: Any, learned: Floats, learns: float
    ) -> Floats:
        held, fallen = self.baseline.count[ids], self._fallen(ids, distance)
        least = least_drifts(held, scalar) + fallen + learned
        up = least + np.where(scalar, 0.0, max(learns - fallen, 0.0))
        down = np.maximum(least, self.groups.least_fall[ids] + fallen)
        down[self.groups.may_fade[ids]] = np.inf
        drift: Floats = drift_scores(state, distance, unit, (up, down))
        young = (held < DRIFT_WARM_UP) | ~self.groups.drifts[ids]
        drift[young] = 0.0
        state[UP:, :, young] = 0.0
        return drift

    def _learns(self, ids: Any, state: Floats, distance: Floats, judged: Any) -> float:
        """Take in the losses of a record; return how far a size may rise in addition, as the model learns.

        A loss that is not judged, as it crosses zero, tells of no learning.
        """
        losses = rows_where(self.groups.is_loss[ids])
        if len(losses):
            falls = np.where(judged[losses], -distance[0, losses], 0.0)
            in_deviations = falls / np.maximum(state[SCALE, 0, losses], LEAST_SCALE)
            self._falls.append((float(falls.mean()), float(in_deviations.mean())))  # of all micro-steps alike
        if not self._falls or self._last_fallen[1] <= 0:
            return 0.0
        fall, deviations = (statistics.median(each) for each in zip(*self._falls, strict=True))
        return float(max(min(LEARNS * fall, MOST_LEARNT), PLATEAU * min(max(deviations - LEAVES, 0.0), 1.0)))

    def _fallen(self, ids: Any, distance: Floats) -> float:
        """Return how far the loss is below its location, in log units.

        While it falls the model learns: gradients fall with it, and logits, weights and activations grow.
        """
        loss = self.groups.is_loss[ids]
        if loss.any():
            self._last_fallen = -float(distance[0, loss].min(initial=0.0)), LOSS_REMEMBERED
        return self._last_fallen[0] if self._last_fallen[1] > 0 else 0.0

    def _spike_tail(self, number: int) -> ScoreTail:
        if number not in self._spikes:
            self._spikes[number] = ScoreTail(OF_SCALARS if self.groups.names[number] == SCALARS else OF_TENSORS)
        return self._spikes[number]

    def _drift_tail(self, number: int) -> ScoreTail:
        if number not in self._drifts:
            self._drifts[number] = ScoreTail(OF_DRIFTS)
        return self._drifts[number]

    def _combine(self, found: ScoredRecord, rows: GroupRows, judged: Any) -> float:
        """Fill in the p-values of rows; return the p-value of the record."""
        groups = rows.among(judged)
        tensors = [n for n, _ in groups if self.groups.names[n] not in WEIGHTS]
        share = (1 - sum(WEIGHTS.values()) - WEIGHT_OF_COMMON) / max(len(tensors), 1)
        smallest = 1.0
        for number, of in groups:
            weight = WEIGHTS.get(self.groups.names[number], share)
            for scores, p, tail in (
                (found.score, found.p, self._spike_tail(number)),
                (found.drift, found.drift_p, self._drift_tail(number)),
            ):
                odd = of[scores[of] > LOWEST]
                if len(odd):
                    p[odd] = tail.survival(scores[odd])
                    smallest = min(smallest, 2 * len(of) * float(p[odd].min()) / weight)
        for common in found.common.values():
            smallest = min(smallest, common.p * len(found.common) / WEIGHT_OF_COMMON)
        return smallest

    def saved(self, size: int) -> dict[str, Any]:
        """Return the learned state as plain data; `size` is the number of series."""
        names = self.groups.names
        return {
            **self.baseline.saved(size),
            "leaps": self.step_noise.saved(),
            "loss_starts": self.learned_loss.saved(),
            "kinds": names,
            "records": min(self._records, MEANS_AFTER),
            **self.common.saved(),
            "spikes": {names[n]: t.saved() for n, t in self._spikes.items()},
            "drifts": {names[n]: t.saved() for n, t in self._drifts.items()},
        }

    def load_groups(self, saved: dict[str, Any]) -> None:
        """Restore the saved tails and common changes."""
        self._records = int(saved.get("records", MEANS_AFTER))
        self.common.load(saved)
        for name in saved["kinds"]:
            number = self.groups.number(name)
            for tail, key in ((self._spike_tail, "spikes"), (self._drift_tail, "drifts")):
                if name in saved[key]:
                    tail(number).load(saved[key][name])


def _moved_mean(features: Floats, newest: Floats, location: Floats) -> Floats:
    """Return how far means have moved since the newest sample, as shares of the usual root mean squares, shape (n,).

    An output with a free offset, as a critic's, is all offset until it glides through zero: then its mean ÷ root mean
    square crosses to the other side within a few steps that move the mean little.
    """
    size = SIZES - 1  # of the root mean square
    with np.errstate(over="ignore", invalid="ignore"):
        now = features[MEAN_FEATURE] * np.exp(features[size] - location[size])
        before = newest[MEAN_FEATURE] * np.exp(newest[size] - location[size])
        moved: Floats = np.abs(now - before)
    return moved


def _away(features: Floats, before: Floats, common: Floats, floor: Floats | None) -> Floats:
    """Return how far the sizes of rows have moved, less a common change; sizes below the floor count as the floor."""
    now: Floats = features[:SIZES] - common
    if floor is None:
        now -= before[:SIZES]
    else:
        np.maximum(now, floor, out=now)
        now -= np.maximum(before[:SIZES], floor)
    return now
