"""What soft detection makes of a record."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.common_changes import Common
from trainsentry.anomaly.features import SIZES, Floats


@dataclass
class Soft:
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
    common: dict[int, Common]
    p_all: float = 1.0

    def scores_alone(self) -> "Soft":
        """Return what the tails learn of; the rest is not kept until they do."""
        none: Floats = np.zeros(0)
        return Soft(
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
