"""Compares the ranks' records of a step: collectives, data, losses and times."""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly import conservation
from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.conservation import Call, Sums
from trainsentry.anomaly.learned_reductions import LearnedReductions
from trainsentry.anomaly.peers import PeerRule, Told
from trainsentry.anomaly.reductions import ReductionRule
from trainsentry.anomaly.replicas import explained_by_calls
from trainsentry.collectors.fingerprints import fingerprints
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_INPUT,
    COMMUNICATION_CALL,
    COMMUNICATION_INPUT,
    COMMUNICATION_QUANTITIES,
    COMMUNICATION_SECONDS,
    GRADIENT_UNREDUCED,
    STEP_SECONDS,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import INFS, MEAN, NANS, NORM, VALUE
from trainsentry.monitor.recorder.gathering import Gathering

SCALARS: Final = frozenset({"loss", STEP_SECONDS, COMMUNICATION_SECONDS})

REDUCED: Final = frozenset({"all_reduce", "reduce_scatter_tensor", "reduce_scatter"})
"""What gradients of data-parallel ranks go through."""

Key = tuple[str, str, int, int]
"""A call on all ranks: op, group, the group's first rank, order in the group."""


def is_compared(series: Series) -> bool:
    """Whether a series is needed here."""
    if series.scalar:
        return series.name in SCALARS
    data = series.quantity == ACTIVATION_INPUT and series.module == ""
    return data or series.quantity == GRADIENT_UNREDUCED or series.quantity in COMMUNICATION_QUANTITIES


class Comparison:
    """Keeps what ranks say of steps that are not complete yet, and judges each once."""

    def __init__(self) -> None:
        self.data_parallel: set[int] = set()
        self._peers = PeerRule()
        self._told: dict[int, dict[int, Told]] = {}
        self._sides: dict[int, dict[int, dict[str, _Side]]] = {}
        self._reductions = ReductionRule()
        self._learned = LearnedReductions()

    def take(self, rank: int, table: SeriesTable, record: StepRecord) -> None:
        """Take one rank's rows of a step."""
        unreduced = False
        told = self._told.setdefault(record.step, {}).setdefault(rank, Told())
        sides = self._sides.setdefault(record.step, {}).setdefault(rank, {})  # a step may come in several records
        for row, series_id in enumerate(record.ids.tolist()):
            series = table.series[series_id]
            if not is_compared(series):
                continue
            values = record.values[row]
            if series.scalar:
                _note_scalar(told, series.name, float(values[VALUE]))
            elif series.quantity == ACTIVATION_INPUT:
                if not np.isfinite(values[VALUE]) and np.isnan(values[[MEAN, NORM]]).any():
                    continue  # a table with few statistics: batches would be alike by chance
                bits = int(fingerprints(values[None])[0])
                told.data = float((int(told.data or 0) * 31 + bits) % 2**53)  # all inputs together
            elif series.quantity == GRADIENT_UNREDUCED:
                unreduced = True
                told.gradient = (told.gradient or 0.0) + float(values[NORM]) ** 2
            else:
                call = series.name if series.quantity == COMMUNICATION_CALL else series.index.split("|")[2]
                layout = table.layouts[record.layouts[row]]
                sides.setdefault(call, _Side()).take(series, values, layout.numel, layout.dtype, row)
        if unreduced:
            self._reductions.take(rank, table, record)

    def go_back(self, step: int) -> None:
        """Forget steps from `step` on."""
        self._told = {s: told for s, told in self._told.items() if s < step}
        self._sides = {s: sides for s, sides in self._sides.items() if s < step}
        self._reductions.go_back(step)

    def judge(self, done: int) -> Iterator[tuple[int, list[Anomaly]]]:
        """Yield what is odd about each step up to `done`."""
        for step in sorted(s for s in self._told if s <= done):
            told, sides = self._told.pop(step), self._sides.pop(step, {})
            _note_reduced(told, sides)
            found = self._peers.judge(step, told, frozenset(self.data_parallel))
            found += self._reductions.judge(step, self.data_parallel)
            for call in _calls_of(sides):
                found += conservation.judge(step, self._learned.named(call))
            if found:
                yield step, found


def differences(gathering: Gathering, comparison: Comparison) -> Iterator[tuple[int, list[Anomaly]]]:
    """Yield, step by step, what only the ranks together show, of steps that every rank has sent."""
    parted, gathering.parted = gathering.parted, []
    by_step: dict[int, list[Anomaly]] = {}
    for anomaly in parted:
        by_step.setdefault(anomaly.step, []).append(anomaly)
    for step, found in comparison.judge(gathering.settled):
        by_step.setdefault(step, []).extend(found)
    for step in sorted(by_step):
        yield step, explained_by_calls(by_step[step])


class _Side:
    """One rank's part in a call."""

    def __init__(self) -> None:
        self.key: Key | None = None
        self.size = self.reduction = self.order = 0
        self.inputs: list[Sums] = []
        self.outputs: list[Sums] = []

    def take(self, series: Series, values: npt.NDArray[np.float64], numel: int, dtype: str, row: int) -> None:
        if series.quantity == COMMUNICATION_CALL:
            op, group, _ = series.index.split("|")
            sequence, _, _, size, first, reduction = (int(x) if math.isfinite(x) else 0 for x in values[:6].tolist())
            self.key, self.size, self.reduction = (op, group, first, sequence), size, reduction
            return
        bad = float(values[NANS] + values[INFS])
        total = float(values[MEAN]) * (numel - bad) if numel > bad else 0.0
        known = bool(np.isfinite(values[[MEAN, NORM]]).all()) or numel == 0  # else a table that lacks them
        sums = Sums(total, float(values[NORM]), numel, bad == 0 and known, dtype)
        if series.quantity == COMMUNICATION_INPUT:
            self.inputs.append(sums)
        else:
            self.outputs.append(sums)
            self.order = row


def _calls_of(ranks: dict[int, dict[str, _Side]]) -> Iterator[Call]:
    """Yield the calls of a step that all their ranks have told of, whole."""
    gathered: dict[Key, dict[int, tuple[str, _Side]]] = {}
    for rank, sides in ranks.items():
        for name, side in sides.items():
            if side.key is not None and side.inputs and side.outputs:
                gathered.setdefault(side.key, {})[rank] = (name, side)
    for key, told in gathered.items():
        name, first = next(iter(told.values()))
        if len(told) == first.size:
            yield Call(
                name,
                key[0],
                first.reduction,
                {rank: Sums.of(side.inputs) for rank, (_, side) in told.items()},
                {rank: Sums.of(side.outputs) for rank, (_, side) in told.items()},
                {rank: side.order for rank, (_, side) in told.items()},
                {rank: side.reduction for rank, (_, side) in told.items()},
            )


def _note_reduced(told: dict[int, Told], ranks: dict[int, dict[str, _Side]]) -> None:
    """Take what goes into reductions for a rank's own gradients, where those are not collected by themselves."""
    if any(t.gradient is not None for t in told.values()):
        return
    for rank, sides in ranks.items():
        squares = [
            part.norm**2
            for side in sides.values()
            if side.key is not None and side.key[0] in REDUCED and side.reduction
            for part in side.inputs
            if part.dtype in conservation.EPSILON
        ]
        if squares and rank in told:
            told[rank].gradient = sum(squares)


def _note_scalar(told: Told, name: str, value: float) -> None:
    if name == "loss":
        told.loss = value
    elif name == STEP_SECONDS:
        told.seconds = value
    else:
        told.waited = value
