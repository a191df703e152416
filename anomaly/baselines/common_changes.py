"""Changes that all series of a kind make at once: taken out of each series, and judged as one series."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.baselines.baseline import LOCATION, NEWEST, SCALE, Baseline
from trainsentry.anomaly.baselines.row_scores import OUTLIER, medians
from trainsentry.anomaly.baselines.score_tail import LOWEST, OF_COMMON, ScoreTail
from trainsentry.anomaly.baselines.series_groups import SCALARS, GroupRows, SeriesGroups
from trainsentry.anomaly.baselines.thresholds import FALLS, LEAST_FALL
from trainsentry.anomaly.features import FEATURES, SIZES, Floats
from trainsentry.collectors.series import ACTIVATION_INPUT, ACTIVATION_OUTPUT, TENSOR_QUANTITIES

FORWARD: Final = frozenset({ACTIVATION_INPUT, ACTIVATION_OUTPUT})

WARM_UP: Final = 5
"""Samples before a kind is judged."""

TOGETHER: Final = 8
"""Series of a kind from which on their median says what all do at once."""

COMMON_FLOOR: Final = 0.1
COMMON_JUMP: Final = 0.9
"""Smallest deviation of what all series of a kind do at once, and least jump of it (a factor of 2.5), in log units."""

FRONT: Final = 1
PART_OF_IT: Final = 0.3
"""Rows in front that stand still where a change begins behind them, and the share of the change up to which they do."""

MOVED: Final = 0.35
"""Median change, in log units (a factor of 1.4), from which on it is asked who takes part in it."""

YOUNG_COMMON: Final = 16.0
"""Added to the deviation, divided by the square of the number of samples: a third at seven, nothing at fifty."""

LEAST_COMMON: Final = 5.0
"""Deviations of what all series of a kind do at once from which on it is listed in an alarm."""


@dataclass
class CommonChange:
    """What all series of a kind do at once: the median change of their size in log units, and how odd that is."""

    change: float
    score: float
    p: float
    rows: int


@dataclass
class ScoredRecord:
    """What was found in a record: arrays over its rows, and what all series of a kind do at once by kind.

    `features` and `distance` have a line for each feature. `floor` is the least size that is followed. `score` counts
    deviations of the feature `feature`, `p` is its p-value within the row's kind; `drift` is the cumulative sum.
    `surprise` is −log10 of the p-value of the whole record, by Bonferroni's rule.
    """

    features: Floats
    floor: Floats | None
    state: Floats
    score: Floats
    feature: npt.NDArray[np.intp]
    distance: Floats
    p: Floats
    drift: Floats
    drift_p: Floats
    common: dict[int, CommonChange]
    p_all: float = 1.0

    def scores_alone(self) -> "ScoredRecord":
        """Return what the tails learn of; the rest is not kept until they do."""
        none: Floats = np.zeros(0)
        return ScoredRecord(
            features=none,
            floor=None,
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

    def usual(self, row: int, feature: int) -> float:
        """Return what a feature would be if nothing were odd."""
        now = float(self.features[feature, row])
        if feature < SIZES and self.floor is not None:
            now = max(now, float(self.floor[feature, row]))
        return now - float(self.distance[feature, row])

    @property
    def surprise(self) -> float:
        """−log10 of the record's p-value."""
        return float(-np.log10(max(self.p_all, 1e-300)))


class CommonChanges:
    """Follows the median change of each kind, in log units."""

    def __init__(self, kinds: SeriesGroups) -> None:
        self.kinds = kinds
        self._baseline = Baseline()
        self._tail = ScoreTail(OF_COMMON)

    def judge(
        self, rows: GroupRows, distance: Floats, jump: Floats, fallen: float
    ) -> tuple[dict[int, CommonChange], Floats, Floats]:
        """Return what all series of each kind do at once, and the shifts and leaps to take out, by kind.

        `fallen` is how far the loss has fallen, in log units: gradients fall with it.
        """
        size = len(self.kinds.names)
        shift, leap = np.zeros((2, SIZES, size), np.float32)
        found: dict[int, CommonChange] = {}
        self._baseline.grow(size)
        both = np.concatenate([distance[:SIZES], jump[:SIZES]])
        for number, of in rows.groups:
            count = len(of)
            if count < TOGETHER or self.kinds.names[number] == SCALARS:
                continue
            shift[:, number], leap[:, number] = medians(both.take(of, axis=1)).reshape(2, SIZES)
            changes = float(shift[1, number]), float(leap[1, number])
            if self._begins_midway(number, changes, (distance[1, of[:FRONT]], jump[1, of[:FRONT]])):
                shift[:, number] = leap[:, number] = 0.0
            found[number] = self._judge(number, float(shift[1, number]), count, fallen)
        return found, shift, leap

    def _begins_midway(self, number: int, changes: tuple[float, float], front: tuple[Floats, Floats]) -> bool:
        """Whether a sudden change begins behind the first rows, in the order of execution: it is handed on then.

        Only in the forward pass: healthy gradients swing by a factor of ten from batch to batch, some more than others.
        Rows of which nothing is known yet have moved by nothing, and say nothing.
        """
        if self.kinds.names[number] not in FORWARD or min(abs(c) for c in changes) <= COMMON_JUMP:
            return False
        away, step_noise = front
        still = (np.abs(away) < PART_OF_IT * abs(changes[0])) & (np.abs(step_noise) < PART_OF_IT * abs(changes[1]))
        return bool(still.all() and (away != 0).all())

    def _judge(self, number: int, change: float, rows: int, fallen: float) -> CommonChange:
        state, held = self._baseline.state[:, :, number], int(self._baseline.count[number])
        if held < WARM_UP or self.kinds.names[number] not in TENSOR_QUANTITIES:  # moments follow the gradients
            return CommonChange(change, 0.0, 1.0, rows)
        unit = max(state[SCALE, 1], COMMON_FLOOR) + YOUNG_COMMON / held**2
        away, leap = change - state[LOCATION, 1], change - state[NEWEST, 1]
        least = LEAST_FALL + fallen if away < 0 and self.kinds.names[number] in FALLS else COMMON_JUMP
        score = min(abs(away), abs(leap)) / unit if away * leap > 0 and min(abs(away), abs(leap)) > least else 0.0
        p = float(self._tail.survival(np.array([score]))[0]) if score > LOWEST else 1.0
        return CommonChange(change, score, p, rows)

    def learn(self, found: dict[int, CommonChange]) -> None:
        """Take what all series did at once into its baseline."""
        usual = {n: c for n, c in found.items() if c.score <= OUTLIER}
        if usual:
            ids = np.array(list(usual))
            features = np.full((len(FEATURES), len(ids)), np.nan)
            features[1] = [c.change for c in usual.values()]
            self._baseline.learn(ids, self._baseline.state[:, :, ids], features, 0)
        self._baseline.note_outliers(np.array([n for n in found if n not in usual], np.intp))

    def learn_tail(self, found: dict[int, CommonChange], weight: float) -> None:
        """Take how odd it was as what is usual."""
        if found:
            self._tail.learn(np.array([c.score for c in found.values()]), weight)

    def expect_change(self) -> None:
        """Take the next sample of every kind as its level."""
        self._baseline.begin_anew(slice(None))

    def saved(self) -> dict[str, Any]:
        """Return plain data, in the order of the kinds."""
        size = min(len(self.kinds.names), len(self._baseline.count))
        return {"together": self._baseline.saved(size), "common": self._tail.saved()}

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what was saved."""
        self._tail.load(saved["common"])
        for place, name in enumerate(saved["kinds"][: len(saved["together"]["count"])]):
            self._baseline.adopt(self.kinds.number(name), saved["together"], place)


def shared(change: Floats, moved: Floats, kind: Any) -> Floats:
    """Return what each row has of the change that its kind makes: no more than it has moved itself.

    A row that stands still while all others move is as it was, and one that moves less has moved with them. `change`
    has a column for each kind, `moved` one for each row.
    """
    of_kind: Floats = change.take(kind, axis=1)
    if np.abs(change).max(initial=0.0) <= MOVED:
        return of_kind
    own = np.clip(moved[:SIZES], np.minimum(of_kind, 0.0), np.maximum(of_kind, 0.0))
    return np.where(np.abs(of_kind) > MOVED, own, of_kind)
