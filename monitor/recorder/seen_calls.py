"""Collective calls of steps, put together from what ranks tell of them; what is incomplete here goes up the tree."""

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly import conservation
from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.collective_call import Call, Sums, put_together, seen_by
from trainsentry.anomaly.learned_reductions import LearnedReductions
from trainsentry.collectors.series import COMMUNICATION_CALL, COMMUNICATION_INPUT, Layout, Series
from trainsentry.collectors.statistics import INFS, MEAN, NANS, NORM

REDUCED: Final = frozenset({"all_reduce", "reduce_scatter_tensor", "reduce_scatter"})
"""What gradients of data-parallel ranks go through."""

WAITING_STEPS: Final = 64
"""Steps whose calls wait for ranks that report elsewhere, as many as records wait for."""

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
        """Take one row of a record: the call's numbers, or the statistics of a tensor."""
        if series.quantity == COMMUNICATION_CALL:
            op, group, _ = series.index.split("|")
            sequence, _, _, size, first, reduction = (int(x) if math.isfinite(x) else 0 for x in values[:6].tolist())
            self.key, self.size, self.reduction = (op, group, first, sequence), size, reduction
            return
        bad = float(values[NANS] + values[INFS])
        total = float(values[MEAN]) * (layout.numel - bad) if layout.numel > bad else 0.0
        known = bool(np.isfinite(values[[MEAN, NORM]]).all()) or layout.numel == 0  # else a table that lacks them
        sums = Sums(total, float(values[NORM]), layout.numel, bad == 0 and known, layout.dtype)
        if series.quantity == COMMUNICATION_INPUT:
            self.inputs.append(sums)
        else:
            self.outputs.append(sums)
            self.order = row

    def reduced_squares(self) -> list[float]:
        """Return the squared norms of what went into a reduction of floating-point numbers."""
        if self.key is None or self.key[0] not in REDUCED or not self.reduction:
            return []
        return [part.norm**2 for part in self.inputs if part.dtype in conservation.EPSILON]


class SeenCalls:
    """Keeps the calls of steps until all their ranks are known, and judges each once."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[Key, tuple[int, list[Call]]]] = {}
        self._learned = LearnedReductions()

    def take(self, step: int, rank: int, sides: dict[str, Side]) -> None:
        """Take what one rank has told of a step, all of it."""
        for name, side in sides.items():
            if side.key is not None and side.inputs and side.outputs:
                both = Sums.of(side.inputs), Sums.of(side.outputs)
                self._add(step, side.key, side.size, seen_by(rank, name, side.key[0], both, side.order, side.reduction))

    def take_parts(self, step: int, parts: list[dict[str, Any]]) -> None:
        """Take what another recorder's ranks have seen, as `left` gave it."""
        for part in parts:
            op, group, first, sequence = part["key"]
            self._add(step, (op, group, first, sequence), part["size"], Call.from_json(part["call"]))

    def _add(self, step: int, key: Key, size: int, call: Call) -> None:
        self._parts.setdefault(step, {}).setdefault(key, (size, []))[1].append(call)

    def judge(self, done: int) -> Iterator[Anomaly]:
        """Yield what is wrong with calls, up to step `done`, that all their ranks have told of, whole."""
        for step in sorted(s for s in self._parts if s <= done):
            calls = self._parts[step]  # one that is done leaves; what is left may be completed by parts from elsewhere
            for key, (size, parts) in list(calls.items()):
                if sum(part.ranks for part in parts) == size:
                    del calls[key]
                    yield from conservation.judge(step, self._learned.named(put_together(parts)))
        for step in sorted(self._parts)[:-WAITING_STEPS]:
            del self._parts[step]

    def left(self, done: int) -> dict[int, list[dict[str, Any]]]:
        """Return by step, and forget, the calls up to step `done` that have ranks elsewhere, as plain data."""
        found = {step: self._parts.pop(step) for step in sorted(s for s in self._parts if s <= done)}
        return {
            step: [
                {"key": key, "size": size, "call": put_together(parts).to_json()}
                for key, (size, parts) in calls.items()
            ]
            for step, calls in found.items()
            if calls
        }

    def go_back(self, step: int) -> None:
        """Forget steps from `step` on."""
        self._parts = {s: calls for s, calls in self._parts.items() if s < step}
