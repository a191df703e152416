"""Soft evidence: how far each row is from what its series does, and how improbable that makes the step."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.baseline import LOCATION, NEWEST, SCALE, SIBLINGS, UP, Baseline
from trainsentry.anomaly.features import FEATURES, SIZES, Floats, features_of
from trainsentry.anomaly.kinds import SCALARS, Kinds
from trainsentry.anomaly.leaps import Leaps
from trainsentry.anomaly.row_scores import drift_scores, least_drifts, medians, spike_scores
from trainsentry.anomaly.tail import OF_COMMON, OF_DRIFTS, OF_SCALARS, OF_TENSORS, Tail
from trainsentry.anomaly.trifles import Trifles
from trainsentry.collectors.series import ACTIVATION_INPUT, TENSOR_QUANTITIES, SeriesTable

WARM_UP: Final = 5
"""Samples before a series is judged: the fewest for which a centre and a deviation mean something."""

FEW_ELEMENTS: Final = 0.7
"""Deviation of the log size of one normal number, over the square root of how many there are: added to every tensor's
own, so that a bias of four elements may vanish for once."""

GROWN: Final = 64
"""Samples from which on a series' own deviation is taken as it is."""

OUTLIER: Final = 5.0
"""Deviations from which on a sample is not learned from."""

TOGETHER: Final = 8
"""Series of a kind from which on their median says what all do at once."""

COMMON_FLOOR: Final = 0.1
COMMON_JUMP: Final = 0.9
"""Smallest deviation of what all series of a kind do at once, and least jump of it (a factor of 2.5), in log units."""

YOUNG_COMMON: Final = 2.5
"""Added to the deviation, divided by the number of samples, as for each series alone."""

LEAST_COMMON: Final = 5.0
"""Deviations of what all series of a kind do at once from which on it is listed in an alarm."""

DRIFT_WARM_UP: Final = 40
"""Samples before a drift counts: a young model drifts everywhere."""

WEIGHTS: Final = {SCALARS: 0.2, ACTIVATION_INPUT: 0.1}
WEIGHT_OF_COMMON: Final = 0.1
"""Shares of the false alarms that logged scalars, the data, and changes of all series at once may use: there are few of
them. The other kinds share the rest."""


@dataclass
class Soft:
    """What was found in a record: arrays over its rows, and what all series of a kind do at once by kind.

    `usual` is what the features would be if nothing were odd. `score` counts deviations of the feature `feature`, `p` is
    its p-value within the row's kind; `drift` is the cumulative sum. `surprise` is −log10 of the p-value of the whole
    record, by Bonferroni's rule.
    """

    features: Floats
    usual: Floats
    state: Floats
    score: Floats
    feature: npt.NDArray[np.intp]
    distance: Floats
    p: Floats
    drift: Floats
    drift_p: Floats
    common: dict[int, "Common"]
    p_all: float = 1.0

    def scores_alone(self) -> "Soft":
        """Return what the tails learn of; the rest is not kept until they do."""
        none: Floats = np.zeros(0)
        return Soft(
            features=none,
            usual=none,
            state=none,
            score=self.score.astype(np.float32),
            feature=np.zeros(0, np.intp),
            distance=none,
            p=none,
            drift=self.drift.astype(np.float32),
            drift_p=none,
            common=self.common,
            p_all=self.p_all,
        )

    @property
    def surprise(self) -> float:
        """−log10 of the record's p-value."""
        return float(-np.log10(max(self.p_all, 1e-300)))


@dataclass
class Common:
    """What all series of a kind do at once: the median change of their size in log units, and how odd that is."""

    change: float
    score: float
    p: float
    rows: int


class SoftRule:
    """Judges records by what their series did before."""

    def __init__(self, table: SeriesTable) -> None:
        self.kinds = Kinds(table)
        self._trifles = Trifles(self.kinds)
        self.baseline = Baseline()
        self.leaps = Leaps()
        self.together = Baseline()
        self._spikes: dict[int, Tail] = {}
        self._drifts: dict[int, Tail] = {}
        self._common_tail = Tail(OF_COMMON)

    def judge(self, ids: Any, values: Floats, numel: Floats, scalar: Any, divisor: Floats, judged: Any) -> Soft:
        """Return the evidence in rows; `judged` says which of them may be called abnormal."""
        self.kinds.refresh()
        self.baseline.grow(len(self.kinds.of))
        self._trifles.refresh(self.baseline)
        all_ids, ids = ids, as_slice(ids)
        kind = self.kinds.of[ids]
        features = features_of(values, numel, scalar, divisor)
        state = self.baseline.state[:, ids]
        held = self.baseline.count[ids]
        location, newest = state[LOCATION], state[NEWEST]
        unit = self._unit(ids, state, held, kind)
        unit[:, :SIZES] += np.where(scalar, 0.0, FEW_ELEMENTS / np.sqrt(np.maximum(numel, 1.0)))[:, None]
        distance, jump = features - location, features - newest
        unknown = np.flatnonzero(np.isnan(distance) | (held < WARM_UP)[:, None])
        distance.flat[unknown] = jump.flat[unknown] = 0.0
        common, shift, leap = self._common(kind, distance, jump)
        distance[:, :SIZES] = self._trifles.away(kind, features, location, shift)
        jump[:, :SIZES] = self._trifles.away(kind, features, newest, leap)
        distance.flat[unknown] = jump.flat[unknown] = 0.0
        fallen, least_fall = self._fallen(ids, distance), self.kinds.fall[ids]
        least_fall = least_fall + fallen * (least_fall > 0)
        unit_of_spikes = self._of_spikes(all_ids, unit, distance, held, scalar)
        score, best = spike_scores(distance, jump, unit_of_spikes, self.kinds.jump[ids], least_fall)
        least = least_drifts(held, scalar) + fallen
        down = np.maximum(least, least_fall)
        down[self.kinds.is_loss[ids]] = np.inf  # that it falls is what training is for
        drift: Floats = drift_scores(state, distance, unit, (least, down))
        young = (held < DRIFT_WARM_UP) | ~self.kinds.drifts[ids]
        drift[young] = 0.0
        state[UP:, young] = 0.0
        found = Soft(
            features=features,
            usual=self._usual(kind, features, distance),
            state=state,
            score=score,
            feature=best,
            distance=distance,
            p=np.ones(len(kind)),
            drift=drift,
            drift_p=np.ones(len(kind)),
            common=common,
        )
        found.p_all = self._combine(found, kind, judged)
        return found

    def learn(self, ids: Any, found: Soft, healthy: Any, step: int) -> None:
        """Take healthy rows into the baselines and the tails; the others count as outliers."""
        far = found.score > OUTLIER
        nothing = np.isnan(found.features).T
        known = ~(nothing[0] & nothing[1] & nothing[2] & nothing[3])  # four columns: quicker than a reduction of rows
        take = healthy & ~far & known
        self._learn_leaps(ids, found, take)
        where = as_slice(ids)
        if isinstance(where, slice):  # found.state is the baseline's own
            left_out = ids[~take]
            kept = self.baseline.copy_of(left_out)
            self.baseline.learn(where, found.state, found.features, step)
            self.baseline.put_back(left_out, kept)
        else:
            self.baseline.state[UP:, ids] = found.state[UP:]
            self.baseline.learn(ids[take], found.state[:, take], found.features[take], step)
        self.baseline.last_clean[ids[healthy & ~known]] = step
        self.baseline.note_outliers(ids[healthy & far])

    def _learn_leaps(self, ids: Any, found: Soft, take: Any) -> None:
        rows = np.flatnonzero(take & (self.kinds.of[ids] == self.kinds.number(SCALARS)))
        jump = found.features[rows, 0] - found.state[NEWEST, rows, 0]
        known = np.isfinite(jump) & (self.baseline.count[ids[rows]] > 0)
        self.leaps.learn(ids[rows[known]].tolist(), jump[known])

    def learn_tails(self, ids: Any, found: Soft, judged: Any, weight: float = 1.0) -> None:
        """Take the scores of a record that raised no alarm as what is usual; they count for `weight` of others."""
        kind = self.kinds.of[ids]
        for number in _numbers(kind[judged]):
            rows = judged & (kind == number)
            self._spike_tail(number).learn(found.score[rows], weight)
            self._drift_tail(number).learn(found.drift[rows], weight)
        if found.common:
            self._common_tail.learn(np.array([c.score for c in found.common.values()]), weight)

    def begin_drift_anew(self, ids: Any) -> None:
        """Forget the cumulative sums of series that were reported."""
        self.baseline.state[UP:, ids] = 0.0

    def expect_change(self) -> None:
        """Take the next sample of every series as its level: something is known to have changed."""
        self.baseline.begin_anew(slice(None))
        self.together.begin_anew(slice(None))

    # ------------------------------------------------------------------ parts

    def _unit(self, ids: Any, state: Floats, held: Any, kind: Any) -> Floats:
        """Return one deviation of each feature: the series' own, drawn towards that of its kind while it is young."""
        floor = self.kinds.floor[ids]
        unit: Floats = np.maximum(state[SCALE], floor)
        young = held < GROWN
        if young.any():
            logs = np.log(unit)
            of_kind = np.zeros((len(self.kinds.names), len(FEATURES)))
            old = held >= WARM_UP
            for number in _numbers(kind[old]):
                of_kind[number] = np.median(logs[old & (kind == number)], axis=0)
            weight = (held / (held + SIBLINGS))[:, None]
            drawn = np.exp(weight * logs + (1 - weight) * np.maximum(of_kind[kind], np.log(floor)))
            np.copyto(unit, np.maximum(drawn, floor), where=young[:, None])
        unit += (self.kinds.young[ids] / np.maximum(held, 1))[:, None]
        return unit

    def _usual(self, kind: Any, features: Floats, distance: Floats) -> Floats:
        found: Floats = features - distance
        found[:, :SIZES] = self._trifles.raised(kind, features[:, :SIZES]) - distance[:, :SIZES]
        return found

    def _of_spikes(self, ids: Any, unit: Floats, distance: Floats, held: Any, scalar: Any) -> Floats:
        """Return the deviations that spikes are measured by: of a scalar that rises, that of its moves if less."""
        rows = np.flatnonzero(scalar & (distance[:, 0] > 0))
        if not len(rows):
            return unit
        found: Floats = unit.copy()
        own = np.array(self.leaps.deviations(ids[rows].tolist()))
        own = np.maximum(own, self.kinds.floor[ids][rows, 0]) + (self.kinds.young[ids] / np.maximum(held, 1))[rows]
        found[rows, :SIZES] = np.minimum(unit[rows, :SIZES], own[:, None])
        return found

    def _fallen(self, ids: Any, distance: Floats) -> Floats:
        """Return how far the loss is below what it was, in log units, for all rows but its own.

        While it falls the model learns: gradients fall with it, and logits, weights and activations grow.
        """
        loss = self.kinds.is_loss[ids]
        fallen: Floats = np.where(loss, 0.0, -float(distance[loss, 0].min(initial=0.0)))
        return fallen

    def _common(self, kind: Any, distance: Floats, jump: Floats) -> tuple[dict[int, Common], Floats, Floats]:
        """Return what all series of each kind do at once, and the shifts and leaps to take out, by kind."""
        size = len(self.kinds.names)
        shift, leap = np.zeros((2, size, SIZES), np.float32)
        found: dict[int, Common] = {}
        self.together.grow(size)
        both = np.concatenate([distance.T[:SIZES], jump.T[:SIZES]])  # a line each: medians of columns are slow
        for number in _numbers(kind):
            rows = np.flatnonzero(kind == number)
            count = len(rows)
            if count < TOGETHER or self.kinds.names[number] == SCALARS:
                continue
            shift[number], leap[number] = medians(both[:, rows]).reshape(2, SIZES)
            found[number] = self._judge_common(number, float(shift[number, 1]), count)
        return found, shift, leap

    def _judge_common(self, number: int, change: float, rows: int) -> Common:
        state, held = self.together.state[:, number], int(self.together.count[number])
        if held < WARM_UP or self.kinds.names[number] not in TENSOR_QUANTITIES:  # moments follow the gradients
            return Common(change, 0.0, 1.0, rows)
        unit = max(state[SCALE, 1], COMMON_FLOOR) + YOUNG_COMMON / held
        away, leap = change - state[LOCATION, 1], change - state[NEWEST, 1]
        score = min(abs(away), abs(leap)) / unit if away * leap > 0 and min(abs(away), abs(leap)) > COMMON_JUMP else 0.0
        p = float(self._common_tail.survival(np.array([score]))[0])
        return Common(change, score, p, rows)

    def learn_common(self, found: Soft) -> None:
        """Take what all series do at once into its baseline."""
        usual = {n: c for n, c in found.common.items() if c.score <= OUTLIER}
        if usual:
            ids = np.array(list(usual))
            features = np.full((len(ids), len(FEATURES)), np.nan)
            features[:, 1] = [c.change for c in usual.values()]
            self.together.learn(ids, self.together.state[:, ids], features, 0)
        self.together.note_outliers(np.array([n for n in found.common if n not in usual], np.intp))

    def _spike_tail(self, number: int) -> Tail:
        if number not in self._spikes:
            self._spikes[number] = Tail(OF_SCALARS if self.kinds.names[number] == SCALARS else OF_TENSORS)
        return self._spikes[number]

    def _drift_tail(self, number: int) -> Tail:
        if number not in self._drifts:
            self._drifts[number] = Tail(OF_DRIFTS)
        return self._drifts[number]

    def _combine(self, found: Soft, kind: Any, judged: Any) -> float:
        """Fill in the p-values of rows; return that of the record."""
        numbers = _numbers(kind[judged])
        tensors = [n for n in numbers if self.kinds.names[n] not in WEIGHTS]
        share = (1 - sum(WEIGHTS.values()) - WEIGHT_OF_COMMON) / max(len(tensors), 1)
        smallest = 1.0
        for number in numbers:
            rows = judged & (kind == number)
            weight = WEIGHTS.get(self.kinds.names[number], share)
            count = int(rows.sum())
            for scores, p, tail in (
                (found.score, found.p, self._spike_tail(number)),
                (found.drift, found.drift_p, self._drift_tail(number)),
            ):
                odd = rows & (scores > 0)
                if odd.any():
                    p[odd] = tail.survival(scores[odd])
                    smallest = min(smallest, 2 * count * float(p[odd].min()) / weight)
        for common in found.common.values():
            smallest = min(smallest, common.p * len(found.common) / WEIGHT_OF_COMMON)
        return smallest

    def saved(self, size: int) -> dict[str, Any]:
        """Return what was learned as plain data; `size` is the number of series."""
        names = self.kinds.names
        return {
            **self.baseline.saved(min(size, len(self.baseline.count))),
            "leaps": self.leaps.saved(),
            "kinds": names,
            "together": self.together.saved(min(len(names), len(self.together.count))),
            "spikes": {names[n]: t.saved() for n, t in self._spikes.items()},
            "drifts": {names[n]: t.saved() for n, t in self._drifts.items()},
            "common": self._common_tail.saved(),
        }

    def load_kinds(self, saved: dict[str, Any]) -> None:
        """Go on with the tails and the common changes that were saved."""
        self._common_tail.load(saved["common"])
        for place, name in enumerate(saved["kinds"]):
            number = self.kinds.number(name)
            if place < len(saved["together"]["count"]):
                self.together.adopt(number, saved["together"], place)
            for tail, key in ((self._spike_tail, "spikes"), (self._drift_tail, "drifts")):
                if name in saved[key]:
                    tail(number).load(saved[key][name])


def as_slice(ids: Any) -> Any:
    """Return consecutive ids as a slice: it needs no copy, and records usually hold all series in order."""
    n = len(ids)
    if n and int(ids[-1]) - int(ids[0]) == n - 1 and (np.diff(ids) == 1).all():
        return slice(int(ids[0]), int(ids[0]) + n)
    return ids


def _numbers(kind: Any) -> list[int]:
    """Return the kinds that there are, in order."""
    found: list[int] = np.flatnonzero(np.bincount(kind)).tolist() if len(kind) else []
    return found
