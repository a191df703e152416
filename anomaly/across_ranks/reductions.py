"""Gradients are averaged over the ranks: what the optimizer gets follows from what each rank had."""

import math
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any, Final

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
"""By parameter, the sum of its gradient's elements before and after the reduction."""

ALIKE: Final = 1e-6
"""Relative difference of reduced sums that are the same: replicas that have parted tell another story."""


@dataclass(frozen=True)
class _Part:
    """Sums of `ranks` ranks together: of what they had, added up, and of what each of them got (`alike`: the same)."""

    ranks: int
    first: int
    sums: Sums
    alike: bool


class ReductionRule:
    """Follows the factor between the ranks' mean gradient and the reduced one, by least squares over parameters.

    Of each parameter the sums of its elements are compared: sums are linear, so that the sum of the mean is the mean of
    the sums. It needs both gradients (`before_reduction`), whole on each rank.
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, Sums]] = {}
        self._parts: dict[int, dict[tuple[int, int], _Part]] = {}
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

    def take_part(self, step: int, source: int, part: dict[str, Any] | None) -> None:
        """Take what the ranks that report to another, `source`, have told of a step, put together by its `left`."""
        if part is not None:
            sums = {name: (before, after) for name, (before, after) in part["sums"].items()}
            found = _Part(part["ranks"], part["first"], sums, part["alike"])
            self._parts.setdefault(step, {})[source, found.first] = found

    def go_back(self, step: int, source: int) -> None:
        """Forget what one source has told of steps from `step` on."""
        for told in [told for s, told in self._steps.items() if s >= step]:
            told.pop(source, None)
        for parts in [parts for s, parts in self._parts.items() if s >= step]:
            for key in [key for key in parts if key[0] == source]:
                del parts[key]

    def left(self, step: int, data_parallel: AbstractSet[int]) -> dict[str, Any] | None:
        """Return, and forget, what is known of a step, for where the other ranks report."""
        part = self._put_together(step, data_parallel)
        return None if part is None else asdict(part)

    def judge(self, step: int, data_parallel: AbstractSet[int]) -> list[Anomaly]:
        """Return an anomaly when the reduced gradient is too large for what went in."""
        part = self._put_together(step, data_parallel)
        if part is None or part.ranks < 2 or part.ranks != len(data_parallel) or not part.alike:
            return []
        before, got = np.array([part.sums[name] for name in sorted(part.sums)]).reshape(-1, 2).T
        mean = before / part.ranks
        power = float(mean @ mean)
        factor = float(mean @ got) / power if power > 0 and np.isfinite(got).all() else math.nan
        if not math.isfinite(factor):
            return []
        usual, self._factors = self._largest, self._factors + 1
        if self._factors > FACTORS_BEFORE and factor > LARGER * usual > 0:
            return [_anomaly(step, part.first, factor, usual)]
        self._largest = max(usual, factor)
        return []

    def _put_together(self, step: int, data_parallel: AbstractSet[int]) -> _Part | None:
        """Return what all ranks that are known have told of a step, and forget it and all before."""
        ranks, parts = self._steps.get(step, {}), list(self._parts.get(step, {}).values())
        self._steps = {s: told for s, told in self._steps.items() if s > step}
        self._parts = {s: told for s, told in self._parts.items() if s > step}
        parts += [_Part(1, rank, sums, alike=True) for rank, sums in ranks.items() if rank in data_parallel]
        if not parts:
            return None
        names = set.intersection(*(set(part.sums) for part in parts))
        after = np.array([[part.sums[n][1] for n in sorted(names)] for part in parts])
        alike = bool(np.allclose(after, after[0], rtol=ALIKE, atol=1e-12)) and all(part.alike for part in parts)
        sums = {n: (sum(part.sums[n][0] for part in parts), parts[0].sums[n][1]) for n in names}
        return _Part(sum(part.ranks for part in parts), min(part.first for part in parts), sums, alike)

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
