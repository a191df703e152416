"""Combines the ranks' reports on collective calls and judges complete calls; incomplete ones go up the tree."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.across_ranks.collective_call import (
    COPIED,
    COPIED_IN_FLOAT32,
    CollectiveCall,
    Sums,
    put_together,
    seen_by,
)
from trainsentry.anomaly.across_ranks.conservation import EPSILON, ConservationRule
from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.collectors.series import COMMUNICATION_CALL, COMMUNICATION_INPUT, Layout, Series
from trainsentry.collectors.statistics import INFS, MEAN, NANS, NORM

REDUCED: Final = frozenset({"all_reduce", "reduce_scatter_tensor", "reduce_scatter"})
"""Collectives that reduce the gradients of data-parallel ranks."""

WAITING_STEPS: Final = 64
"""Steps whose calls wait for other ranks, as many as wait for records."""

MAX_COUNT: Final = 2.0**53
"""The largest integer up to which a float counts exactly."""

Key = tuple[str, str, int, int]
"""A call on all ranks: op, group, the group's first rank, order in the group."""


class Side:
    """One rank's part in a call."""

    def __init__(self) -> None:
        self.key: Key | None = None
        self.size = self.reduction = self.order = 0
        self.inputs: list[Sums] = []
        self.outputs: list[Sums] = []

    def take(self, series: Series, values: npt.NDArray[np.float64], layout: Layout, row: int) -> None:
        """Add one row of a record: the call's numbers, or the statistics of a tensor."""
        if series.quantity == COMMUNICATION_CALL:
            op, group, _ = series.index.split("|")
            sequence, _, _, size, first, reduction = map(_counted, values[:6].tolist())
            self.key, self.size, self.reduction = (op, group, first, sequence), size, reduction
            return
        bad = float(values[NANS] + values[INFS])
        total = float(values[MEAN]) * (layout.numel - bad) if layout.numel > bad else 0.0
        known = bool(np.isfinite(values[[MEAN, NORM]]).all()) or layout.numel == 0  # a table may lack both
        copied = _precision(values, layout)
        sums = Sums(total, float(values[NORM]), layout.numel, bad == 0 and known, layout.dtype, copied)
        if series.quantity == COMMUNICATION_INPUT:
            self.inputs.append(sums)
        else:
            self.outputs.append(sums)
            self.order = row

    def reduced_squares(self) -> list[float]:
        """Return the squared norms of the inputs of a floating-point reduction."""
        if self.key is None or self.key[0] not in REDUCED or not self.reduction:
            return []
        return [part.norm * part.norm for part in self.inputs if part.dtype in EPSILON]


def _precision(values: npt.NDArray[np.float64], layout: Layout) -> float:
    """Return the precision of a row's sums: one that was computed in float64 is hardly ever a float32 number."""
    if layout.numel <= 1:
        return COPIED
    with np.errstate(over="ignore", invalid="ignore"):
        sums = values[[MEAN, NORM]]
        return COPIED_IN_FLOAT32 if np.array_equal(sums.astype(np.float32), sums, equal_nan=True) else COPIED


def _counted(number: float) -> int:
    """Return a call's number as an integer; 0 for NaN and for numbers that are too large."""
    return int(number) if abs(number) < MAX_COUNT else 0  # the comparison is false for NaN


class CollectiveLedger:
    """Keeps the calls of steps until all ranks have reported, and judges each once."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[Key, _Seen]] = {}
        self._changed: set[tuple[int, Key]] = set()
        self._rule = ConservationRule()

    def take(self, step: int, rank: int, sides: dict[str, Side]) -> None:
        """Add one rank's complete report on a step."""
        for name, side in sides.items():
            if side.key is not None and side.inputs and side.outputs:
                both = Sums.of(side.inputs), Sums.of(side.outputs)
                call = seen_by(rank, name, side.key[0], both, side.order, side.reduction)
                self._add(step, side.key, side.size, rank, call)

    def take_parts(self, step: int, source: int, parts: list[dict[str, Any]]) -> None:
        """Add the calls that another recorder, `source`, sent from its `left`."""
        for part in parts:
            op, group, first, sequence = part["key"]
            self._add(step, (op, group, first, sequence), part["size"], source, CollectiveCall.from_json(part["call"]))

    def _add(self, step: int, key: Key, size: int, source: int, call: CollectiveCall) -> None:
        seen = self._steps.setdefault(step, {}).setdefault(key, _Seen(size))
        seen.parts[source, call.first] = call  # a part repeated by a successor counts once
        self._changed.add((step, key))

    def judge(self, done: int) -> Iterator[Anomaly]:
        """Yield the anomalies of complete calls up to step `done`."""
        for step, key in sorted(item for item in self._changed if item[0] <= done):
            self._changed.discard((step, key))
            seen = self._steps.get(step, {}).get(key)
            if seen is not None and seen.is_whole:
                del self._steps[step][key]
                whole = put_together(list(seen.parts.values()))
                yield from self._rule.judge(step, whole)
        for step in sorted(self._steps)[:-WAITING_STEPS]:
            del self._steps[step]

    def left(self, done: int) -> dict[int, list[dict[str, Any]]]:
        """Remove the incomplete calls up to step `done`; return them by step, as plain data."""
        found = {}
        for step in sorted(s for s in self._steps if s <= done):
            calls = [seen.to_json(key) for key, seen in self._steps.pop(step).items() if seen.parts]
            if calls:
                found[step] = calls
        return found

    def go_back(self, step: int, source: int) -> None:
        """Drop one source's reports on steps from `step` on."""
        for calls in [calls for s, calls in self._steps.items() if s >= step]:
            for seen in calls.values():
                seen.forget(source)


class _Seen:
    """The parts of one call, by source and the part's first rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: dict[tuple[int, int], CollectiveCall] = {}

    @property
    def is_whole(self) -> bool:
        return sum(part.ranks for part in self.parts.values()) == self.size

    def forget(self, source: int) -> None:
        self.parts = {key: call for key, call in self.parts.items() if key[0] != source}

    def to_json(self, key: Key) -> dict[str, Any]:
        return {"key": key, "size": self.size, "call": put_together(list(self.parts.values())).to_json()}
