"""Compares the ranks' records of a step: collectives, data, losses and times."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.across_ranks.peers import PeerRule, RankReport
from trainsentry.anomaly.across_ranks.reductions import ReductionRule
from trainsentry.anomaly.across_ranks.replicas import explained_by_calls
from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_INPUT,
    COMMUNICATION_CALL,
    COMMUNICATION_ORDER,
    COMMUNICATION_QUANTITIES,
    COMMUNICATION_SECONDS,
    GRADIENT_UNREDUCED,
    STEP_SECONDS,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import MEAN, NORM, VALUE, fingerprints
from trainsentry.monitor.recorder.ranks.collective_ledger import WAITING_STEPS, CollectiveLedger, Side
from trainsentry.monitor.recorder.ranks.replica_groups import Copy
from trainsentry.monitor.recorder.ranks.shard_assembly import ShardAssembly

OWN: Final = -1
"""The source of what was found here."""

SCALARS: Final = frozenset({"loss", STEP_SECONDS, COMMUNICATION_SECONDS, COMMUNICATION_ORDER})


def is_compared(series: Series) -> bool:
    """Whether a series is needed here."""
    if series.scalar:
        return series.name in SCALARS
    data = series.quantity == ACTIVATION_INPUT and series.module == ""
    return data or series.quantity == GRADIENT_UNREDUCED or series.quantity in COMMUNICATION_QUANTITIES


class Comparison:
    """Keeps what ranks say of steps that are not complete yet, and judges each once.

    Where other ranks report elsewhere, only the root of all recorders can compare: then `left` gives what is for it.
    """

    def __init__(self) -> None:
        self.data_parallel: set[int] = set()
        self.calls = CollectiveLedger()
        self._peers = PeerRule()
        self._reductions = ReductionRule()
        self._told: dict[int, dict[int, RankReport]] = {}
        self._sides: dict[int, dict[int, dict[str, Side]]] = {}
        self._wanted: dict[int, tuple[SeriesTable, npt.NDArray[np.bool_]]] = {}
        self._found: dict[int, dict[int, list[Anomaly]]] = {}
        self._through: dict[int, int] = {}
        self._judged = -1

    def take(self, rank: int, table: SeriesTable, record: StepRecord) -> None:
        """Take one rank's rows of a step."""
        rows = np.flatnonzero(self._wanted_of(rank, table)[record.ids]).tolist()
        if not rows or record.step <= self._judged:
            return
        unreduced = False
        told = self._told.setdefault(record.step, {}).setdefault(rank, RankReport())
        sides = self._sides.setdefault(record.step, {}).setdefault(rank, {})  # a step may come in several records
        for row in rows:
            series, values = table.series[record.ids[row]], record.values[row]
            if series.scalar:
                _note_scalar(told, series.name, float(values[VALUE]))
            elif series.quantity == ACTIVATION_INPUT:
                if not np.isfinite(values[VALUE]) and np.isnan(values[[MEAN, NORM]]).any():
                    continue  # a table with few statistics: batches would be alike by chance
                bits = int(fingerprints(values[None])[0])
                told.data = float((int(told.data or 0) * 31 + bits) % 2**53)  # all inputs together
            elif series.quantity == GRADIENT_UNREDUCED:
                unreduced = True
                told.gradient = (told.gradient or 0.0) + float(values[NORM] * values[NORM])
            else:
                call = series.name if series.quantity == COMMUNICATION_CALL else series.index.split("|")[2]
                sides.setdefault(call, Side()).take(series, values, table.layouts[record.layouts[row]], row)
        if unreduced:
            self._reductions.take(rank, table, record)

    def _wanted_of(self, rank: int, table: SeriesTable) -> npt.NDArray[np.bool_]:
        """Return which of a rank's series are compared."""
        known, wanted = self._wanted.get(rank, (table, np.zeros(0, bool)))
        if known is not table:
            wanted = np.zeros(0, bool)
        if len(wanted) < len(table.series):
            wanted = np.append(wanted, [is_compared(s) for s in table.series[len(wanted) :]])
        self._wanted[rank] = table, wanted
        return wanted

    def take_parts(self, source: int, message: dict[str, Any]) -> None:
        """Take what the ranks that report to another recorder, `source`, have told of a step, as its `left` gave it."""
        step = message["step"]
        self.calls.take_parts(step, source, message["calls"])
        self.take_found(step, [Anomaly.from_json(a) for a in message["found"]], source)
        self._through.update({rank: source for rank, *_ in message["told"]})
        if step > self._judged:
            known = self._told.setdefault(step, {})
            for rank, *told in message["told"]:
                known.setdefault(rank, RankReport(*told))  # what comes again comes in pieces
            self._reductions.take_part(step, source, message["reductions"])

    def take_found(self, step: int, found: list[Anomaly], source: int = OWN) -> None:
        """Take what was found among some of the ranks; what all of them show may explain it."""
        if found:
            self._found.setdefault(step, {}).setdefault(source, []).extend(found)

    def go_back(self, step: int, sources: Iterable[int]) -> None:
        """Forget what sources, ranks or the recorders of several, have told of steps from `step` on."""
        self._judged = min(self._judged, step - 1)
        for source in (OWN, *sources):
            self._forget(source, step)

    def _forget(self, source: int, step: int) -> None:
        for s in [s for s in self._told if s >= step]:
            self._told[s] = {r: t for r, t in self._told[s].items() if source not in {r, self._through.get(r)}}
        for s in [s for s in self._sides if s >= step]:
            self._sides[s].pop(source, None)
        for s in [s for s in self._found if s >= step]:
            self._found[s].pop(source, None)
        self._reductions.go_back(step, source)
        self.calls.go_back(step, source)

    @property
    def overdue(self) -> int:
        """The last step that has waited too long for ranks that say nothing."""
        waiting = sorted({*self._told, *self._sides})
        return waiting[-WAITING_STEPS - 1] if len(waiting) > WAITING_STEPS else -1

    def judge(self, done: int, *, final: bool = True) -> Iterator[tuple[int, list[Anomaly]]]:
        """Yield what is odd about steps up to `done`; without `final`, in calls among the ranks that report here."""
        by_step: dict[int, list[Anomaly]] = {}
        for step in sorted(s for s in self._sides if s <= done):
            sides = self._sides.pop(step)
            _note_reduced(self._told.get(step, {}), sides)
            for rank, seen in sides.items():
                self.calls.take(step, rank, seen)
        for anomaly in self.calls.judge(done):
            by_step.setdefault(anomaly.step, []).append(anomaly)
        for step in sorted(s for s in self._told if final and s <= done):
            self._judged = max(self._judged, step)
            found = self._peers.judge(step, self._told.pop(step), frozenset(self.data_parallel))
            found += self._reductions.judge(step, self.data_parallel)
            by_step.setdefault(step, []).extend(found)
        for step in sorted(s for s in self._found if final and s <= done):
            by_step.setdefault(step, []).extend(_flat(self._found.pop(step)))
        for step in sorted(by_step):
            if by_step[step]:
                yield step, by_step[step]

    def left(self, done: int, copies: Mapping[int, Sequence[Copy]]) -> Iterator[dict[str, Any]]:
        """Yield, and forget, what is for the root to compare of steps up to `done`, as plain data.

        `copies` are those that differ among the ranks that report here, by step.
        """
        calls = self.calls.left(done)
        for step in sorted({s for s in (*self._told, *self._found) if s <= done} | set(calls) | set(copies)):
            yield {
                "step": step,
                "told": [(rank, *astuple(t)) for rank, t in self._told.pop(step, {}).items()],
                "calls": calls.get(step, []),
                "copies": copies.get(step, []),
                "reductions": self._reductions.left(step, self.data_parallel),
                "found": [a.to_json() for a in _flat(self._found.pop(step, {}))],
            }


def differences(
    assembly: ShardAssembly, judged: Iterable[tuple[int, list[Anomaly]]]
) -> Iterator[tuple[int, list[Anomaly]]]:
    """Yield, step by step, what only the ranks together show: replicas that part, and what was judged of calls."""
    parted, assembly.copies.parted = assembly.copies.parted, []
    by_step: dict[int, list[Anomaly]] = {}
    for anomaly in parted:
        by_step.setdefault(anomaly.step, []).append(anomaly)
    for step, found in judged:
        by_step.setdefault(step, []).extend(found)
    for step in sorted(by_step):
        yield step, explained_by_calls(by_step[step])


def _flat(found: dict[int, list[Anomaly]]) -> list[Anomaly]:
    return [anomaly for anomalies in found.values() for anomaly in anomalies]


def _note_reduced(told: dict[int, RankReport], ranks: dict[int, dict[str, Side]]) -> None:
    """Take what goes into reductions for a rank's own gradients, where those are not collected by themselves."""
    if any(told[rank].gradient is not None for rank in ranks if rank in told):
        return
    for rank, sides in ranks.items():
        squares = [square for side in sides.values() for square in side.reduced_squares()]
        if squares and rank in told:
            told[rank].gradient = sum(squares)


def _note_scalar(told: RankReport, name: str, value: float) -> None:
    if name == "loss":
        told.loss = value
    elif name == STEP_SECONDS:
        told.seconds = value
    elif name == COMMUNICATION_ORDER:
        told.order = value
    else:
        told.waited = value
