"""Gradients are averaged over the ranks: the reduced gradient follows from the gradient of each rank."""

import math
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import COMMUNICATION_MISMATCH, Anomaly, Detector
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import COMMUNICATION_OUTPUT, GRADIENT, GRADIENT_UNREDUCED, SeriesTable
from trainsentry.collectors.statistics import INFS, MEAN, NANS

SCORE: Final = 100.0
"""Deviations: a rule whose bound holds for any run, as no healthy reduction becomes larger."""

LEAST_RATIO: Final = 1.5
"""A new factor counts at this multiple of the largest one so far: clipping makes it smaller, nothing makes it larger,
and a sum over two ranks is twice their mean."""

FACTORS_BEFORE: Final = 10
"""Steps whose factor was seen, before one counts."""

Sums = dict[str, tuple[float, float]]
"""By parameter, the sum of its gradient's elements before and after the reduction."""

ALIKE: Final = 1e-6
"""Relative difference up to which reduced sums are equal; replicas that differ have a rule of their own."""


@dataclass(frozen=True)
class _Part:
    """Sums of `ranks` ranks: of their own gradients together, and of the reduced ones.

    A reduced gradient is whole on each rank (`alike`: equal on all of them), or of the names `sharded` a part is on
    each, so that the sums of the parts are added.
    """

    ranks: int
    first: int
    sums: Sums
    alike: bool
    sharded: tuple[str, ...] = ()


class ReductionRule(Detector):
    """Follows the factor between the ranks' mean gradient and the reduced one, by least squares over parameters.

    It compares the sums of each parameter's elements: sums are linear, so that the sum of the mean is the mean of the
    sums. It needs both gradients (`before_reduction`); each rank's own is whole, the reduced one may be sharded.
    """

    name: ClassVar[str] = "reductions"
    compares_ranks: ClassVar[bool] = True

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, _Part]] = {}
        self._parts: dict[int, dict[tuple[int, int], _Part]] = {}
        self._largest = 0.0
        self._factors = 0

    def take(self, rank: int, table: SeriesTable, record: StepRecord) -> None:
        """Take one rank's gradients of a step."""
        before, pieces = self._sums(table, record, GRADIENT_UNREDUCED)
        before = {name: total for name, total in before.items() if name not in pieces}
        if not before:
            return
        after, parts = self._sums(table, record, GRADIENT)
        both = {name: (total, after[name]) for name, total in before.items() if name in after}
        if both:
            sharded = tuple(sorted(parts & both.keys()))
            self._steps.setdefault(record.step, {})[rank] = _Part(1, rank, both, alike=True, sharded=sharded)

    def take_part(self, step: int, source: int, part: dict[str, Any] | None) -> None:
        """Take the sums of a step from the ranks that report to another recorder, `source`, as its `left` made them."""
        if part is not None:
            sums = {name: (before, after) for name, (before, after) in part["sums"].items()}
            found = _Part(part["ranks"], part["first"], sums, part["alike"], tuple(part["sharded"]))
            self._parts.setdefault(step, {})[source, found.first] = found

    def go_back(self, step: int, source: int) -> None:
        """Forget the sums of one source for steps from `step` on."""
        for ranks in [ranks for s, ranks in self._steps.items() if s >= step]:
            ranks.pop(source, None)
        for parts in [parts for s, parts in self._parts.items() if s >= step]:
            for key in [key for key in parts if key[0] == source]:
                del parts[key]

    def left(self, step: int, data_parallel: AbstractSet[int]) -> dict[str, Any] | None:
        """Return the sums of a step for the recorder that compares all ranks, and forget them."""
        part = self._put_together(step, data_parallel)
        return None if part is None else asdict(part)

    def judge(self, step: int, data_parallel: AbstractSet[int]) -> list[Anomaly]:
        """Return an anomaly when the reduced gradient is too large for the gradients of the ranks."""
        part = self._put_together(step, data_parallel)
        if part is None or part.ranks < 2 or part.ranks != len(data_parallel) or not part.alike:
            return []
        before, reduced = np.array([part.sums[name] for name in sorted(part.sums)]).reshape(-1, 2).T
        mean = before / part.ranks
        power = float(mean @ mean)
        factor = float(mean @ reduced) / power if power > 0 and np.isfinite(reduced).all() else math.nan
        if not math.isfinite(factor):
            return []
        usual, self._factors = self._largest, self._factors + 1
        if self._factors > FACTORS_BEFORE and factor > LEAST_RATIO * usual > 0:
            return [_anomaly(step, part.first, factor, usual)]
        self._largest = max(usual, factor)
        return []

    def _put_together(self, step: int, data_parallel: AbstractSet[int]) -> _Part | None:
        """Return the sums of a step over all known ranks, and forget it and the steps before."""
        ranks, parts = self._steps.get(step, {}), list(self._parts.get(step, {}).values())
        self._steps = {s: by_rank for s, by_rank in self._steps.items() if s > step}
        self._parts = {s: by_source for s, by_source in self._parts.items() if s > step}
        parts += [part for rank, part in ranks.items() if rank in data_parallel]
        if not parts:
            return None
        names = set.intersection(*(set(part.sums) for part in parts))
        sharded = names.intersection(*(part.sharded for part in parts))
        names -= set().union(*(part.sharded for part in parts)) - sharded  # whole on some ranks alone
        after = np.array([[part.sums[n][1] for n in sorted(names - sharded)] for part in parts])
        alike = bool(np.allclose(after, after[0], rtol=ALIKE, atol=1e-12)) and all(part.alike for part in parts)
        sums = {
            n: (
                sum(part.sums[n][0] for part in parts),
                sum(part.sums[n][1] for part in parts) if n in sharded else parts[0].sums[n][1],
            )
            for n in names
        }
        ranks_of_all, first = sum(part.ranks for part in parts), min(part.first for part in parts)
        return _Part(ranks_of_all, first, sums, alike, tuple(sorted(sharded)))

    @staticmethod
    def sentence(anomaly: Anomaly, _subject: str) -> str:
        """Return the factor, and the largest one before."""
        return (
            f"the reduced gradients at step {anomaly.step} are {anomaly.value:.3g} times the mean of the ranks' own "
            f"gradients, previously at most {anomaly.expected:.3g} times; possibly summed instead of averaged"
        )

    @staticmethod
    def _sums(table: SeriesTable, record: StepRecord, quantity: str) -> tuple[dict[str, float], set[str]]:
        """Return the sum of each parameter's gradient on this rank, and the names of those that are parts of one."""
        found: dict[str, float] = {}
        several, parts = set(), set()
        for row, series_id in enumerate(record.ids.tolist()):
            series = table.series[series_id]
            layout = table.layouts[record.layouts[row]]
            if series.quantity != quantity:
                continue
            if layout.region:
                parts.add(series.name)
            values = record.values[row]
            if values[NANS] + values[INFS] > 0 or series.name in found:
                several.add(series.name)
                continue
            found[series.name] = float(values[MEAN]) * layout.numel
        return {name: total for name, total in found.items() if name not in several}, parts


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
        detector=ReductionRule.name,
        kind=COMMUNICATION_MISMATCH,
    )
