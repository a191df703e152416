"""Makes findings of scores: the statistic that is odd, its value, its usual value and the kind of fault."""

import math
from dataclasses import dataclass
from typing import Final

from trainsentry.anomaly.anomaly import (
    ALL_AT_ONCE,
    DEAD,
    DRIFT,
    DRIFTS,
    SHIFT,
    SPIKE,
    SPIKES,
    UNDERFLOW,
    UPDATE_SIZE,
)
from trainsentry.anomaly.baselines.common_changes import LEAST_COMMON, ScoredRecord
from trainsentry.anomaly.features import FEATURES, MEAN_FEATURE, SIZES, ZEROS_FEATURE, as_statistic
from trainsentry.anomaly.finding import ALL, Finding
from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Floats
from trainsentry.anomaly.series_facts import BACKWARD
from trainsentry.collectors.series import (
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    GRADIENT,
    GRADIENT_UNREDUCED,
    UPDATE,
    Series,
)

LASTING: Final = 2
"""Outliers in a row before this one that make a spike a new level."""

DEAD_RATIO: Final = 50.0
"""A size is dead below the usual one divided by this: the rest of it has no effect."""


@dataclass(frozen=True, slots=True)
class OutlierFindings:
    """Makes the findings of one record; `divisor` are the known factors in the sizes of its rows, shape (n,)."""

    observed: Observed
    scored: ScoredRecord
    divisor: Floats

    def of_row(self, row: int, in_a_row: int, *, alarm: bool) -> Finding:
        """Return the finding of a row far from usual; `in_a_row` outliers came right before it."""
        scored, series_id = self.scored, int(self.observed.record.ids[row])
        series = self.observed.table.series[series_id]
        drifts = scored.drift[row] > 0 and scored.drift_p[row] < scored.p[row]
        feature = int(abs(scored.distance[:SIZES, row]).argmax()) if drifts else int(scored.feature[row])
        distance = float(scored.distance[feature, row])
        if drifts:
            kind = _kind_of_drift(series, distance, in_a_row)
        else:
            kind = _kind_of_spike(series, feature, distance, in_a_row)
        return Finding(
            series_id=series_id,
            row=row,
            kind=kind,
            detector=DRIFTS if drifts else SPIKES,
            statistic=FEATURES[feature],
            value=self._as_statistic(row, feature, float(scored.features[feature, row])),
            expected=self._as_statistic(row, feature, scored.usual(row, feature)),
            score=float(scored.drift[row] if drifts else scored.score[row]),
            alarm=alarm,
        )

    def _as_statistic(self, row: int, feature: int, value: float) -> float:
        return as_statistic(feature, value, self.observed.numel[row], self.divisor[row])

    def of_groups(self, names: list[str], first_rows: dict[int, int]) -> list[Finding]:
        """Return the findings of common changes; all quantities of the backward pass count as one.

        `names` are the groups by number, `first_rows` the first row of each group in the record.
        """
        changes = self.scored.common
        odd = {names[number]: c for number, c in changes.items() if c.score >= LEAST_COMMON}
        in_order = dict.fromkeys((GRADIENT, GRADIENT_UNREDUCED, *odd))
        backward = [name for name in in_order if name in odd and name in BACKWARD]
        origin = backward[0] if backward else UPDATE
        found = []
        for number, change in changes.items():
            quantity = names[number]
            if quantity not in odd or quantity in backward[1:]:
                continue
            row = first_rows[number]
            found.append(
                Finding(
                    series_id=int(self.observed.record.ids[row]),
                    row=row,
                    kind=UPDATE_SIZE if quantity == UPDATE else SHIFT,
                    detector=ALL_AT_ONCE,
                    statistic="norm",
                    value=math.exp(change.change),
                    expected=1.0,
                    score=change.score,
                    passed_on=None if quantity == origin else True,
                    name=ALL,
                    quantity=GRADIENT if quantity in BACKWARD else None,
                )
            )
        return found


def _kind_of_drift(series: Series, distance: float, in_a_row: int) -> str:
    if distance < -math.log(DEAD_RATIO) and not series.scalar:
        return DEAD
    return DRIFT if in_a_row < LASTING else SHIFT


def _kind_of_spike(series: Series, feature: int, distance: float, in_a_row: int) -> str:
    if feature == ZEROS_FEATURE and distance > 0:
        return DEAD if series.quantity in {ACTIVATION_INPUT, ACTIVATION_OUTPUT} else UNDERFLOW
    if feature < MEAN_FEATURE and distance < -math.log(DEAD_RATIO) and not series.scalar:
        return DEAD
    return SHIFT if in_a_row >= LASTING else SPIKE
