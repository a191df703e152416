"""A gradient that points elsewhere than its optimizer's momentum lets expect: a sign, a stale or a swapped tensor."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.alignment import ALIGNMENT
from trainsentry.collectors.series import GRADIENT, MOMENT_DIRECTION
from trainsentry.collectors.statistics import VALUE

LEARNED: Final = 32
"""Samples of a cosine before it is judged: momentum begins as the first gradient, with which it is parallel."""

MEMORY: Final = 16.0
"""Samples over which location and spread are averaged, some two memories of a momentum of 0.9."""

LEAST_ELEMENTS: Final = 64
"""Elements below which a cosine is noise: that of two random vectors of n elements spreads by 1/√n."""

LEAST_SPREAD: Final = 0.03
"""Least spread that is assumed of a cosine."""

FAR: Final = 8.0
"""Spreads from the usual cosine, beyond what the others moved by at the same step, that count."""

LEAST_TURN: Final = 0.3
"""Least distance of a cosine from its usual one that counts: a sixth of the way from parallel to opposite."""

BEYOND: Final = 0.1
"""Distance by which a cosine must also leave the range that it has had."""

TOGETHER: Final = 0.1
"""Share of the judged parameters that may turn at once: where more do, the data or the rate changed."""

CLIPPED: Final = 3.0
"""Spreads to which a sample is clipped before it is learned."""


class DirectionRule(Rule):
    """Follows the cosine of each gradient with its first moment, where the statistic `alignment` is collected.

    Norms are the same with the sign of a gradient turned, or with the tensor of another layer or step in its place. A
    gradient that passes its best value turns too, so a turn is a suspicion, which joins an incident and opens none.
    """

    name: ClassVar[str] = "direction"
    quantities: ClassVar[frozenset[str]] = frozenset({MOMENT_DIRECTION})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_direction = arrays.series.column(bool, of=lambda s: s.quantity == MOMENT_DIRECTION)
        self._samples = arrays.series.column(np.int64)
        self._usual, self._spread = arrays.series.column(np.float64), arrays.series.column(np.float64)
        self._range = arrays.series.column(np.float64, np.nan, shape=(2,))

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the parameters whose gradient turned away from, or towards, the momentum alone."""
        record = observed.record
        rows = rows_where(self._is_direction.values[record.where] & (observed.numel >= LEAST_ELEMENTS))
        rows = rows[np.isfinite(record.values[rows, VALUE])]
        if not len(rows) or record.skipped:
            return []
        ids, cosines = record.ids[rows].astype(np.int64), record.values[rows, VALUE]
        far = self._turned(ids, cosines)
        self._learn(ids[~far], cosines[~far])
        return [
            Finding(
                int(ids[i]), int(rows[i]), SHIFT, self.name, ALIGNMENT, float(cosines[i]),
                float(self._usual.values[ids[i]]), self._score(ids[i], cosines[i]), alarm=False, quantity=GRADIENT,
            )
            for i in rows_where(far).tolist()
        ]  # fmt: skip

    def _turned(self, ids: Integers, cosines: Floats) -> Mask:
        """Return which cosines are far from usual, shape (n,); none where many turn at once."""
        judged = self._samples.values[ids] >= LEARNED
        distance = cosines - self._usual.values[ids]
        spreads = distance / np.maximum(self._spread.values[ids], LEAST_SPREAD)
        common = float(np.median(spreads[judged])) if judged.any() else 0.0
        low, high = self._range.values[:, ids]
        beyond = (cosines < low - BEYOND) | (cosines > high + BEYOND)
        far = judged & beyond & (np.abs(distance) >= LEAST_TURN) & (np.abs(spreads - common) >= FAR)
        return far if far.sum() <= max(1, TOGETHER * judged.sum()) else np.zeros_like(far)

    def _learn(self, ids: Integers, cosines: Floats) -> None:
        """Take in healthy cosines."""
        samples = self._samples.values[ids]
        first = samples == 0
        weight = 1 / np.minimum(samples + 1, MEMORY)
        usual, spread = self._usual.values, self._spread.values
        step = np.where(first, cosines, cosines - usual[ids])
        bound = np.where(samples < LEARNED, np.inf, CLIPPED * np.maximum(spread[ids], LEAST_SPREAD))
        step = np.where(first, step, np.clip(step, -bound, bound))
        usual[ids] = np.where(first, cosines, usual[ids] + weight * step)
        square = np.where(first, 0.0, (1 - weight) * (spread[ids] ** 2 + weight * step**2))
        spread[ids] = np.sqrt(square)
        self._range.values[0, ids] = np.fmin(self._range.values[0, ids], cosines)
        self._range.values[1, ids] = np.fmax(self._range.values[1, ids], cosines)
        self._samples.values[ids] += 1

    def _score(self, series_id: int, cosine: float) -> float:
        spread = max(float(self._spread.values[series_id]), LEAST_SPREAD)
        return abs(cosine - float(self._usual.values[series_id])) / spread

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return both cosines."""
        where = "away from" if anomaly.value < anomaly.expected else "towards"
        return (
            f"{subject} turns {where} the optimizer's momentum at step {anomaly.step}: the cosine of the angle between "
            f"them is {anomaly.value:.3g}, usually {anomaly.expected:.3g}"
        )
