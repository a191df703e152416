"""Gradients are averaged over the ranks: what the optimizer gets follows from what each rank had."""

import math
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import COMMUNICATION_MISMATCH, Anomaly
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import COMMUNICATION_OUTPUT, GRADIENT, GRADIENT_UNREDUCED, SeriesTable
from trainsentry.collectors.statistics import INFS, MEAN, NANS

NAME: Final = "reductions"
SCORE: Final = 100.0

LARGER: Final = 1.5
"""How many times the largest factor so far a new one must be: clipping makes it smaller, nothing makes it larger, and
two ranks that are summed give twice as much."""

FACTORS_BEFORE: Final = 10
"""Factors that were seen before one counts."""

Sums = dict[str, tuple[float, float]]


class ReductionRule:
    """Follows the factor between the ranks' mean gradient and the reduced one, by least squares over parameters.

    Of each parameter the sums of its elements are compared: sums are linear, so that the sum of the mean is the mean of
    the sums. It needs both gradients (`before_reduction`), whole on each rank.
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, Sums]] = {}
        self._largest = 0.0
        self._factors = 0

    def take(self, rank: int, table: SeriesTable, record: StepRecord) -> None:
        """Take one rank's gradients of a step."""
        before, after = self._sums(table, record, GRADIENT_UNREDUCED), {}
        if before:
            after = self._sums(table, record, GRADIENT)
        both = {name: (total, after[name]) for name, total in before.items() if name in after}
        if both:
            self._steps.setdefault(record.step, {})[rank] = both

    def go_back(self, step: int) -> None:
        """Forget steps from `step` on."""
        self._steps = {s: sums for s, sums in self._steps.items() if s < step}

    def judge(self, step: int, data_parallel: AbstractSet[int]) -> list[Anomaly]:
        """Return an anomaly when the reduced gradient is too large for what went in."""
        for old in [s for s in self._steps if s < step]:
            del self._steps[old]
        ranks = {r: sums for r, sums in self._steps.pop(step, {}).items() if r in data_parallel}
        if len(ranks) < 2 or len(ranks) != len(data_parallel):
            return []
        names = set.intersection(*(set(sums) for sums in ranks.values()))
        totals = np.array([[sums[n][1] for n in sorted(names)] for sums in ranks.values()])
        if not np.allclose(totals, totals[0], rtol=1e-6, atol=1e-12):  # replicas that have parted tell another story
            return []
        mean = np.array([np.mean([sums[n][0] for sums in ranks.values()]) for n in sorted(names)])
        got = totals[0]
        power = float(mean @ mean)
        factor = float(mean @ got) / power if power > 0 and np.isfinite(got).all() else math.nan
        if not math.isfinite(factor):
            return []
        usual, self._factors = self._largest, self._factors + 1
        if self._factors > FACTORS_BEFORE and factor > LARGER * usual > 0:
            return [_anomaly(step, min(ranks), factor, usual)]
        self._largest = max(usual, factor)
        return []

    @staticmethod
    def _sums(table: SeriesTable, record: StepRecord, quantity: str) -> dict[str, float]:
        found: dict[str, float] = {}
        several = set()
        for row, series_id in enumerate(record.ids.tolist()):
            series = table.series[series_id]
            layout = table.layouts[record.layouts[row]]
            if series.quantity != quantity or layout.region:
                continue
            values = record.values[row]
            if values[NANS] + values[INFS] > 0 or series.name in found:
                several.add(series.name)
                continue
            found[series.name] = float(values[MEAN]) * layout.numel
        return {name: total for name, total in found.items() if name not in several}


def _anomaly(step: int, rank: int, factor: float, usual: float) -> Anomaly:
    return Anomaly(
        step=step,
        micro_step=0,
        rank=rank,
        order=0,
        name="all",
        quantity=COMMUNICATION_OUTPUT,
        statistic="factor",
        value=factor,
        expected=usual,
        score=SCORE,
        detector=NAME,
        kind=COMMUNICATION_MISMATCH,
    )
