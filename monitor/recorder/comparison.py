"""Compares the ranks' records of a step: collectives, data, losses and times."""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly import conservation
from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.conservation import Call, Sums
from trainsentry.anomaly.peers import PeerRule, Told
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_INPUT,
    COMMUNICATION_CALL,
    COMMUNICATION_INPUT,
    COMMUNICATION_QUANTITIES,
    COMMUNICATION_SECONDS,
    STEP_SECONDS,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import INFS, MEAN, NANS, NORM, VALUE

SCALARS: Final = frozenset({"loss", STEP_SECONDS, COMMUNICATION_SECONDS})

Key = tuple[str, str, int, int]
"""A call on all ranks: op, group, the group's first rank, order in the group."""


def is_compared(series: Series) -> bool:
    """Whether a series is needed here."""
    if series.scalar:
        return series.name in SCALARS
    data = series.quantity == ACTIVATION_INPUT and series.module == ""
    return data or series.quantity in COMMUNICATION_QUANTITIES


class Comparison:
    """Keeps what ranks say of steps that are not complete yet, and judges each once."""

    def __init__(self) -> None:
        self.data_parallel: set[int] = set()
        self._peers = PeerRule()
        self._told: dict[int, dict[int, Told]] = {}
        self._calls: dict[int, dict[Key, _Gathered]] = {}

    def take(self, rank: int, table: SeriesTable, record: StepRecord) -> None:
        """Take one rank's rows of a step."""
        told = self._told.setdefault(record.step, {}).setdefault(rank, Told())
        sides: dict[str, _Side] = {}
        for row, series_id in enumerate(record.ids.tolist()):
            series = table.series[series_id]
            if not is_compared(series):
                continue
            values = record.values[row]
            if series.scalar:
                _note_scalar(told, series.name, float(values[VALUE]))
            elif series.quantity == ACTIVATION_INPUT:
                told.data = float(values[VALUE]) if told.data is None else told.data
            else:
                call = series.name if series.quantity == COMMUNICATION_CALL else series.index.split("|")[2]
                layout = table.layouts[record.layouts[row]]
                sides.setdefault(call, _Side()).take(series, values, layout.numel, layout.dtype, row)
        calls = self._calls.setdefault(record.step, {})
        for name, side in sides.items():
            if side.key is not None:
                calls.setdefault(side.key, _Gathered(name)).sides[rank] = side

    def judge(self, done: int) -> Iterator[tuple[int, list[Anomaly]]]:
        """Yield what is odd about each step up to `done`."""
        for step in sorted(s for s in self._told if s <= done):
            told, calls = self._told.pop(step), self._calls.pop(step, {})
            found = self._peers.judge(step, told, frozenset(self.data_parallel))
            for gathered in calls.values():
                call = gathered.call()
                found += conservation.judge(step, call) if call is not None else []
            if found:
                yield step, found


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
        sums = Sums(total, float(values[NORM]), numel, bad == 0, dtype)
        if series.quantity == COMMUNICATION_INPUT:
            self.inputs.append(sums)
        else:
            self.outputs.append(sums)
            self.order = row


class _Gathered:
    """One call on the ranks that have told of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sides: dict[int, _Side] = {}

    def call(self) -> Call | None:
        """Return the call once all its ranks have told of it."""
        first = next(iter(self.sides.values()))
        if first.key is None or len(self.sides) != first.size or first.size == 0:
            return None
        return Call(
            self.name,
            first.key[0],
            first.reduction,
            {r: Sums.of(s.inputs) for r, s in self.sides.items() if s.inputs},
            {r: Sums.of(s.outputs) for r, s in self.sides.items() if s.outputs},
            {r: s.order for r, s in self.sides.items()},
        )


def _note_scalar(told: Told, name: str, value: float) -> None:
    if name == "loss":
        told.loss = value
    elif name == STEP_SECONDS:
        told.seconds = value
    else:
        told.waited = value
