"""Puts what was found in rows into findings: which statistic, how large, how large usually, and what kind of fault."""

import math
from collections.abc import Sequence
from typing import Any, Final

from trainsentry.anomaly.anomaly import DEAD, DRIFT, NONFINITE, OVERFLOW, SHIFT, SPIKE, UNDERFLOW, UPDATE_SIZE
from trainsentry.anomaly.baselines.common_changes import LEAST_COMMON, ScoredRecord
from trainsentry.anomaly.baselines.series_groups import SeriesGroups
from trainsentry.anomaly.features import FEATURES, MEAN_FEATURE, SIZES, ZEROS_FEATURE, Floats, in_words
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules import dtype_edge, nonfinite
from trainsentry.anomaly.series_facts import BACKWARD
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    GRADIENT,
    GRADIENT_UNREDUCED,
    UPDATE,
    Series,
)
from trainsentry.collectors.statistics import INFS, NANS

LASTING: Final = 2
"""Samples in a row that were far out before, from which on it is no spike but a new level."""

DEAD_RATIO: Final = 50.0
"""Times smaller than usual that is dead: what is left of it does nothing."""


class Evidence:
    """The evidence of one record."""

    def __init__(
        self,
        record: StepRecord,
        series: Sequence[Series],
        scoring: ScoredRecord,
        numel: Floats,
        divisor: Floats,
        scalar: Any,
    ) -> None:
        self.record = record
        self.series = series
        self.scoring = scoring
        self.numel = numel
        self.divisor = divisor
        self.scalar = scalar

    def of_hard(self, row: int, bad: Any, largest: Floats, edges: Floats) -> Finding:
        """Return what is not finite, or at the edge of its dtype."""
        series_id = int(self.record.ids[row])
        if not bad[row]:
            score = 100.0 + math.log10(largest[row] / edges[row])
            value, edge = float(largest[row]), float(edges[row])
            return Finding(series_id, row, OVERFLOW, dtype_edge.NAME, "max", value, edge, score)
        nans, infs = self.record.values[row, NANS], self.record.values[row, INFS]
        statistic, count = ("nans", nans) if nans > 0 else ("infs", infs)
        return Finding(series_id, row, NONFINITE, nonfinite.NAME, statistic, float(count), 0.0, nonfinite.SCORE)

    def of_soft(self, row: int, in_a_row: int, *, alarm: bool) -> Finding:
        """Return what is far from usual; `in_a_row` samples before it were too."""
        scoring = self.scoring
        scalar = bool(self.scalar[row])
        drifts = scoring.drift[row] > 0 and scoring.drift_p[row] < scoring.p[row]
        feature = int(abs(scoring.distance[:SIZES, row]).argmax()) if drifts else int(scoring.feature[row])
        distance = float(scoring.distance[feature, row])
        value = in_words(feature, float(scoring.features[feature, row]), self.numel[row], self.divisor[row])
        usual = scoring.usual(row, feature)
        expected = in_words(feature, usual, self.numel[row], self.divisor[row])
        kind = (
            (DRIFT if in_a_row < LASTING else SHIFT)
            if drifts
            else self._kind(self.series[self.record.ids[row]], feature, distance, in_a_row)
        )
        if drifts and distance < -math.log(DEAD_RATIO) and not scalar:
            kind = DEAD
        score = float(scoring.drift[row] if drifts else scoring.score[row])
        detector = "drift" if drifts else "spike"
        return Finding(int(self.record.ids[row]), row, kind, detector, FEATURES[feature], value, expected, score, alarm)

    @staticmethod
    def _kind(series: Series, feature: int, distance: float, in_a_row: int) -> str:
        if feature == ZEROS_FEATURE and distance > 0:
            return DEAD if series.quantity in {ACTIVATION_INPUT, ACTIVATION_OUTPUT} else UNDERFLOW
        if feature < MEAN_FEATURE and distance < -math.log(DEAD_RATIO) and not series.scalar:
            return DEAD
        return SHIFT if in_a_row >= LASTING else SPIKE

    def of_common(self, kinds: SeriesGroups, first_rows: dict[int, int]) -> list[Finding]:
        """Return what all series of a kind do at once; the backward pass is one, whatever is read of it."""
        odd = {kinds.names[n]: c for n, c in self.scoring.common.items() if c.score >= LEAST_COMMON}
        first = dict.fromkeys((GRADIENT, GRADIENT_UNREDUCED, *odd))
        backward = [name for name in first if name in odd and name in BACKWARD]
        origin = backward[0] if backward else UPDATE
        found = []
        for number, common in self.scoring.common.items():
            quantity = kinds.names[number]
            if quantity not in odd or quantity in backward[1:]:
                continue
            row = first_rows[number]
            kind = UPDATE_SIZE if quantity == UPDATE else SHIFT
            value, passed_on = math.exp(common.change), None if quantity == origin else True
            series_id = int(self.record.ids[row])
            found.append(
                Finding(series_id, row, kind, "all_at_once", "norm", value, 1.0, common.score, passed_on=passed_on)
            )
        return found
