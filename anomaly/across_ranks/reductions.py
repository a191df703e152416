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

Sums = dict[str, tuple[float, float, int, int]]
"""By parameter: the sum of its gradient's elements before and after the reduction, how many of the reduced elements are
held, and how many the parameter has."""

ALIKE: Final = 1e-6
"""Relative difference up to which reduced sums are equal; replicas that differ have a rule of their own."""


@dataclass(frozen=True)
class _Part:
    """Sums of `ranks` ranks: of their own gradients together, and of the reduced ones that they hold.

    A reduced gradient is whole on each rank (`alike`: equal on all of them), or the ranks hold it in parts, some of
    them perhaps nothing.
    """

    ranks: int
    first: int
    sums: Sums
    alike: bool


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
        before = self._sums(table, record, GRADIENT_UNREDUCED, whole=True)
        after = self._sums(table, record, GRADIENT) if before else {}
        wrong = self._repeated_or_wrong(table, record)
        both = {
            name: (total, *after.get(name, (0.0, 0)), size)
            for name, (total, size) in before.items()
            if size and name not in wrong
        }
        if both:
            self._steps.setdefault(record.step, {})[rank] = _Part(1, rank, both, alike=True)

    def take_part(self, step: int, source: int, part: dict[str, Any] | None) -> None:
        """Take the sums of a step from the ranks that report to another recorder, `source`, as its `left` made them."""
        if part is not None:
            sums = {name: (before, after, held, size) for name, (before, after, held, size) in part["sums"].items()}
            found = _Part(part["ranks"], part["first"], sums, part["alike"])
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
        before, after, held, size = np.array([part.sums[name] for name in sorted(part.sums)]).reshape(-1, 4).T
        copies = held / size
        # The ranks hold it together, each for itself, or the ranks of each replica together; else some is missing.
        known = (copies >= 1) & (copies == np.rint(copies))
        mean, reduced = before[known] / part.ranks, after[known] / copies[known]
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
        names = sorted(set.intersection(*(set(part.sums) for part in parts)))
        each = np.array([[part.sums[name] for name in names] for part in parts]).reshape(len(parts), len(names), 4)
        counts = np.array([part.ranks for part in parts])[:, None]
        whole = (each[:, :, 2] == counts * each[:, :, 3]).all(axis=0)  # on every rank
        after = (each[:, :, 1] / counts)[:, whole]
        alike = bool(np.allclose(after, after[0], rtol=ALIKE, atol=1e-12)) and all(part.alike for part in parts)
        sums = {
            name: (float(before), float(held_sum), int(held), int(size))
            for name, (before, held_sum, held), size in zip(
                names, each[:, :, :3].sum(axis=0).tolist(), each[0, :, 3].tolist(), strict=True
            )
        }
        return _Part(int(counts.sum()), min(part.first for part in parts), sums, alike)

    @staticmethod
    def sentence(anomaly: Anomaly, _subject: str) -> str:
        """Return the factor, and the largest one before."""
        return (
            f"the reduced gradients at step {anomaly.step} are {anomaly.value:.3g} times the mean of the ranks' own "
            f"gradients, previously at most {anomaly.expected:.3g} times; possibly summed instead of averaged"
        )

    @staticmethod
    def _sums(
        table: SeriesTable, record: StepRecord, quantity: str, *, whole: bool = False
    ) -> dict[str, tuple[float, int]]:
        """Return the sum and the number of elements of each gradient on this rank; `whole` leaves out parts of one."""
        found: dict[str, tuple[float, int]] = {}
        for row, series_id in enumerate(record.ids.tolist()):
            series, layout = table.series[series_id], table.layouts[record.layouts[row]]
            if series.quantity == quantity and not (whole and layout.region):
                total = float(record.values[row, MEAN]) * layout.numel if layout.numel else 0.0
                found[series.name] = total, layout.numel
        return found

    @staticmethod
    def _repeated_or_wrong(table: SeriesTable, record: StepRecord) -> set[str]:
        """Return the parameters of which a gradient is not finite, or has several rows."""
        seen: set[tuple[str, str]] = set()
        found: set[str] = set()
        wrong: list[bool] = (record.values[:, NANS] + record.values[:, INFS] > 0).tolist()
        for series_id, is_wrong in zip(record.ids.tolist(), wrong, strict=True):
            series = table.series[series_id]
            if series.quantity in {GRADIENT, GRADIENT_UNREDUCED}:
                key = series.quantity, series.name
                if is_wrong or key in seen:
                    found.add(series.name)
                seen.add(key)
        return found


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
