"""Changes that all series of a group make at once: taken out of each series, and judged as one series."""

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.baselines.baseline import LOCATION, NEWEST, SCALE, Baseline
from trainsentry.anomaly.baselines.row_scores import OUTLIER
from trainsentry.anomaly.baselines.score_tail import LOWEST, OF_COMMON, ScoreTail
from trainsentry.anomaly.baselines.series_groups import SCALARS, GroupRows, SeriesGroups
from trainsentry.anomaly.baselines.thresholds import FALLING, LEAST_FALL
from trainsentry.anomaly.features import FEATURES, SIZES
from trainsentry.anomaly.series_arrays import Floats, medians
from trainsentry.collectors.series import (
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    GRADIENT,
    MOMENT_DIRECTION,
    TENSOR_QUANTITIES,
    UPDATE,
)

FORWARD: Final = frozenset({ACTIVATION_INPUT, ACTIVATION_OUTPUT})

WARM_UP: Final = 5
"""Samples before a group is judged."""

LEAST_SERIES: Final = 8
"""Series of a group for a meaningful median."""

COMMON_FLOOR: Final = 0.1
COMMON_JUMP: Final = 0.9
"""Least deviation assumed of a common change, and its least jump (a factor of 2.5), in log units."""

FRONT: Final = 1
STANDS_STILL: Final = 0.3
"""Rows at the front that stand still where a change begins after them, and the most they move, as a share of it."""

MOVED: Final = 0.35
"""Least common change, in log units (a factor of 1.4), of which each row gets no more than it has moved itself."""

YOUNG_COMMON: Final = 16.0
"""Added to the deviation, divided by the square of the number of samples: a third at seven, nothing at fifty."""

CARRIES_ON: Final = 16
"""Samples for which updates that carry momentum may be as large as the gradients of one sample made them: a momentum of
0.9 keeps a fifth of it for as long."""

LEAST_COMMON: Final = 5.0
"""Least score of a common change that an alarm lists, in deviations."""


@dataclass
class CommonChange:
    """A common change: the median change of a group's sizes in log units, its score and its p-value."""

    change: float
    score: float
    p: float
    rows: int


@dataclass
class ScoredRecord:
    """The scores of a record: arrays over its n rows, and the common change of each group.

    `features` and `distance` have the shape (features, n). `floor` is the least size that is followed. `score` counts
    deviations of the feature `feature`, `p` is its p-value within the row's group; `drift` is the cumulative sum.
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
        """Return a copy with the scores alone: the tails learn from them later, and the rest is not kept until then."""
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
        """Return the usual value of a feature."""
        now = float(self.features[feature, row])
        if feature < SIZES and self.floor is not None:
            now = max(now, float(self.floor[feature, row]))
        return now - float(self.distance[feature, row])

    @property
    def surprise(self) -> float:
        """−log10 of the record's p-value."""
        return float(-np.log10(max(self.p_all, 1e-300)))


class CommonChanges:
    """Follows the median change of each group, in log units."""

    def __init__(self, groups: SeriesGroups) -> None:
        self.groups = groups
        self._baseline = Baseline(groups.columns)
        self._tail = ScoreTail(OF_COMMON)
        # By how much all gradients rose lately where the loss is learned.
        self._risen: deque[float] = deque(maxlen=CARRIES_ON)

    def judge(
        self, rows: GroupRows, distance: Floats, jump: Floats, fallen: float, learned: float
    ) -> tuple[dict[int, CommonChange], Floats, Floats]:
        """Return the common change of each group, and the common distances and jumps to take out, by group.

        `fallen` is how far the loss has fallen now, in log units: gradients fall with it. `learned` is how far a loss
        that tells of single samples has fallen since the start, 0 for another: gradients may rise by as much, as those
        of known samples are small and in part opposite, and one that is not known is as large as ever.
        """
        away, jumped = np.zeros((2, SIZES, len(self.groups.names)), np.float32)
        found: dict[int, CommonChange] = {}
        both = np.concatenate([distance[:SIZES], jump[:SIZES]])
        for number, of in rows.groups:
            count = len(of)
            if count < LEAST_SERIES or self.groups.names[number] == SCALARS:
                continue
            away[:, number], jumped[:, number] = medians(both.take(of, axis=1)).reshape(2, SIZES)
            changes = float(away[1, number]), float(jumped[1, number])
            if self._begins_midway(number, changes, (distance[1, of[:FRONT]], jump[1, of[:FRONT]])):
                away[:, number] = jumped[:, number] = 0.0
            change = float(away[1, number])
            found[number] = self._judge(number, change, count, fallen, self._may_rise(number, change, learned))
        return found, away, jumped

    def _may_rise(self, number: int, change: float, learned: float) -> float:
        """Return how far a group may rise in addition, in log units; what follows gradients rises with them."""
        name = self.groups.names[number]
        if name == GRADIENT:
            self._risen.append(max(change, 0.0) if learned else 0.0)
        if name in {UPDATE, MOMENT_DIRECTION}:
            return max(self._risen, default=0.0)
        return learned if name in FALLING else 0.0

    def _begins_midway(self, number: int, changes: tuple[float, float], front: tuple[Floats, Floats]) -> bool:
        """Whether a sudden change begins after the first rows, in the order of execution: then one row passes it on.

        Only in the forward pass: healthy gradients swing by a factor of ten from batch to batch, some more than others.
        Rows without a baseline have moved by zero, and tell nothing.
        """
        if self.groups.names[number] not in FORWARD or min(abs(c) for c in changes) <= COMMON_JUMP:
            return False
        away, jumped = front
        still = (np.abs(away) < STANDS_STILL * abs(changes[0])) & (np.abs(jumped) < STANDS_STILL * abs(changes[1]))
        return bool(still.all() and (away != 0).all())

    def _judge(self, number: int, change: float, rows: int, fallen: float, may_rise: float) -> CommonChange:
        state, held = self._baseline.state[:, :, number], int(self._baseline.count[number])
        if held < WARM_UP or self.groups.names[number] not in TENSOR_QUANTITIES:  # moments follow the gradients
            return CommonChange(change, 0.0, 1.0, rows)
        unit = max(state[SCALE, 1], COMMON_FLOOR) + YOUNG_COMMON / held**2
        away, jumped = change - state[LOCATION, 1], change - state[NEWEST, 1]
        falls = away < 0 and self.groups.names[number] in FALLING
        least = LEAST_FALL + fallen if falls else COMMON_JUMP + may_rise
        score = min(abs(away), abs(jumped)) / unit if away * jumped > 0 and min(abs(away), abs(jumped)) > least else 0.0
        p = float(self._tail.survival(np.array([score]))[0]) if score > LOWEST else 1.0
        return CommonChange(change, score, p, rows)

    def learn(self, found: dict[int, CommonChange]) -> None:
        """Learn the common changes; outliers are counted only."""
        usual = {n: c for n, c in found.items() if c.score <= OUTLIER}
        if usual:
            ids = np.array(list(usual))
            features = np.full((len(FEATURES), len(ids)), np.nan)
            features[1] = [c.change for c in usual.values()]
            self._baseline.learn(ids, self._baseline.state[:, :, ids], features, 0)
        self._baseline.note_outliers(np.array([n for n in found if n not in usual], np.intp))

    def learn_tail(self, found: dict[int, CommonChange], weight: float) -> None:
        """Learn the scores of common changes as healthy ones."""
        if found:
            self._tail.learn(np.array([c.score for c in found.values()]), weight)

    def expect_change(self) -> None:
        """Take the next sample of every group as its level."""
        self._baseline.reset(slice(None))
        self._risen.clear()

    def saved(self) -> dict[str, Any]:
        """Return plain data, in the order of the groups."""
        self.groups.columns.grow()
        return {"together": self._baseline.saved(len(self.groups.names)), "common": self._tail.saved()}

    def load(self, saved: dict[str, Any]) -> None:
        """Restore the saved common changes."""
        self._tail.load(saved["common"])
        for place, name in enumerate(saved["kinds"][: len(saved["together"]["count"])]):
            number = self.groups.number(name)
            self.groups.columns.grow()
            self._baseline.adopt(number, saved["together"], place)


def shared(change: Floats, moved: Floats, group: Any) -> Floats:
    """Return each row's part in the change of its group: no more than it has moved itself.

    A row that stands still while all others move is unchanged, and one that moves less moved with them. `change` has a
    column for each group, `moved` one for each row.
    """
    of_group: Floats = change.take(group, axis=1)
    if np.abs(change).max(initial=0.0) <= MOVED:
        return of_group
    own = np.clip(moved[:SIZES], np.minimum(of_group, 0.0), np.maximum(of_group, 0.0))
    return np.where(np.abs(of_group) > MOVED, own, of_group)
