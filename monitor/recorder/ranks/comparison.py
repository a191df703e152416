"""Compares the ranks' records of a step: collectives, data, losses and times."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.across_ranks.common_numbers import CommonNumbersRule, CommonSeries
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
    OUTSIDE_SECONDS,
    STEP_SECONDS,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import MEAN, NORM, VALUE, fingerprints
from trainsentry.monitor.recorder.ranks.collective_ledger import WAITING_STEPS, CollectiveLedger, Side
from trainsentry.monitor.recorder.ranks.replica_groups import Copy
from trainsentry.monitor.recorder.ranks.shard_assembly import ShardAssembly

OWN: Final = -1
"""The source of anomalies that this recorder found itself."""

MEASURED: Final = frozenset({STEP_SECONDS, OUTSIDE_SECONDS, COMMUNICATION_SECONDS, COMMUNICATION_ORDER})
"""Scalars of a rank's times and calls, which it has for itself."""


class ComparedSeries:
    """Chooses the series of one rank that the comparison needs."""

    def __init__(self) -> None:
        self._numbers = CommonSeries()

    def takes(self, series: Series) -> bool:
        """Whether a series of the rank's table, each asked for once and in order, is needed."""
        if series.scalar:
            return series.name in MEASURED or self._numbers.takes(series)
        data = series.quantity == ACTIVATION_INPUT and series.module == ""
        return data or series.quantity == GRADIENT_UNREDUCED or series.quantity in COMMUNICATION_QUANTITIES


class Comparison:
    """Keeps the ranks' reports on incomplete steps, and judges each step once.

    If some ranks report to other recorders, only the root can compare all: `left` returns the data for it.
    """

    def __init__(self) -> None:
        self.data_parallel: set[int] = set()
        self.calls = CollectiveLedger()
        self._peers = PeerRule()
        self._reductions = ReductionRule()
        self._numbers = CommonNumbersRule()
        self._reports: dict[int, dict[int, RankReport]] = {}
        self._sides: dict[int, dict[int, dict[str, Side]]] = {}
        self._wanted: dict[int, tuple[SeriesTable, npt.NDArray[np.bool_], ComparedSeries]] = {}
        self._found: dict[int, dict[int, list[Anomaly]]] = {}
        self._through: dict[int, int] = {}
        self._judged = -1

    def take(self, rank: int, table: SeriesTable, record: StepRecord) -> None:
        """Add one rank's rows of a step."""
        rows = np.flatnonzero(self._wanted_of(rank, table)[record.ids]).tolist()
        if not rows or record.step <= self._judged:
            return
        unreduced = False
        report = self._reports.setdefault(record.step, {}).setdefault(rank, RankReport())
        sides = self._sides.setdefault(record.step, {}).setdefault(rank, {})  # a step may come in several records
        for row in rows:
            series, values = table.series[record.ids[row]], record.values[row]
            if series.scalar:
                value = float(values[VALUE])
                _note_scalar(report, series.name, value)
                if series.name not in MEASURED:
                    self._numbers.take(record.step, rank, series.name, value)
            elif series.quantity == ACTIVATION_INPUT:
                if not np.isfinite(values[VALUE]) and np.isnan(values[[MEAN, NORM]]).any():
                    continue  # a table with few statistics: batches would be equal by chance
                bits = int(fingerprints(values[None])[0])
                report.data = float((int(report.data or 0) * 31 + bits) % 2**53)  # all inputs together
            elif series.quantity == GRADIENT_UNREDUCED:
                unreduced = True
                report.gradient = (report.gradient or 0.0) + float(values[NORM] * values[NORM])
            else:
                call = series.name if series.quantity == COMMUNICATION_CALL else series.index.split("|")[2]
                sides.setdefault(call, Side()).take(series, values, table.layouts[record.layouts[row]], row)
        if unreduced:
            self._reductions.take(rank, table, record)

    def _wanted_of(self, rank: int, table: SeriesTable) -> npt.NDArray[np.bool_]:
        """Return a mask of the rank's series that are compared."""
        known, wanted, compared = self._wanted.get(rank, (None, np.zeros(0, bool), ComparedSeries()))
        if known is not table:
            wanted, compared = np.zeros(0, bool), ComparedSeries()
        if len(wanted) < len(table.series):
            wanted = np.append(wanted, [compared.takes(s) for s in table.series[len(wanted) :]])
        self._wanted[rank] = table, wanted, compared
        return wanted

    def take_parts(self, source: int, message: dict[str, Any]) -> None:
        """Add a step's reports that another recorder, `source`, sent from its `left`."""
        step = message["step"]
        self.calls.take_parts(step, source, message["calls"])
        self.take_found(step, [Anomaly.from_json(a) for a in message["found"]], source)
        self._through.update({rank: source for rank, *_ in message["told"]})
        if step > self._judged:
            known = self._reports.setdefault(step, {})
            for rank, *report in message["told"]:
                known.setdefault(rank, RankReport(*report))  # a repeated report may come in pieces: keep the first
            self._reductions.take_part(step, source, message["reductions"])
            self._numbers.take_part(step, message["numbers"])

    def take_found(self, step: int, found: list[Anomaly], source: int = OWN) -> None:
        """Add anomalies found among some ranks; the comparison of all ranks may explain them."""
        if found:
            self._found.setdefault(step, {}).setdefault(source, []).extend(found)

    def go_back(self, step: int, sources: Iterable[int]) -> None:
        """Drop the reports of sources (ranks, or recorders of several ranks) on steps from `step` on."""
        self._judged = min(self._judged, step - 1)
        for source in (OWN, *sources):
            self._forget(source, step)

    def _forget(self, source: int, step: int) -> None:
        for s in [s for s in self._reports if s >= step]:
            self._reports[s] = {r: t for r, t in self._reports[s].items() if source not in {r, self._through.get(r)}}
        for s in [s for s in self._sides if s >= step]:
            self._sides[s].pop(source, None)
        for s in [s for s in self._found if s >= step]:
            self._found[s].pop(source, None)
        self._reductions.go_back(step, source)
        for rank in (source, *(r for r, through in self._through.items() if through == source)):
            self._numbers.go_back(step, rank)
        self.calls.go_back(step, source)

    @property
    def overdue(self) -> int:
        """The last step that has waited too long for silent ranks."""
        waiting = sorted({*self._reports, *self._sides})
        return waiting[-WAITING_STEPS - 1] if len(waiting) > WAITING_STEPS else -1

    def judge(self, done: int, *, final: bool = True) -> Iterator[tuple[int, list[Anomaly]]]:
        """Yield the anomalies of steps up to `done`; without `final`, only of calls among the ranks below this one."""
        by_step: dict[int, list[Anomaly]] = {}
        for step in sorted(s for s in self._sides if s <= done):
            sides = self._sides.pop(step)
            _note_reduced(self._reports.get(step, {}), sides)
            for rank, seen in sides.items():
                self.calls.take(step, rank, seen)
        for anomaly in self.calls.judge(done):
            by_step.setdefault(anomaly.step, []).append(anomaly)
        for step in sorted(s for s in self._reports if final and s <= done):
            self._judged = max(self._judged, step)
            found = self._peers.judge(step, self._reports.pop(step), frozenset(self.data_parallel))
            found += self._reductions.judge(step, self.data_parallel) + self._numbers.judge(step)
            by_step.setdefault(step, []).extend(found)
        for step in sorted(s for s in self._found if final and s <= done):
            by_step.setdefault(step, []).extend(_flat(self._found.pop(step)))
        for step in sorted(by_step):
            if by_step[step]:
                yield step, by_step[step]

    def left(self, done: int, copies: Mapping[int, Sequence[Copy]]) -> Iterator[dict[str, Any]]:
        """Remove the reports on steps up to `done`, and yield them as plain data for the root to compare.

        `copies` holds, by step, the differing copies among the ranks below this one.
        """
        calls = self.calls.left(done)
        for step in sorted({s for s in (*self._reports, *self._found) if s <= done} | set(calls) | set(copies)):
            yield {
                "step": step,
                "told": [(rank, *astuple(t)) for rank, t in self._reports.pop(step, {}).items()],
                "calls": calls.get(step, []),
                "copies": copies.get(step, []),
                "reductions": self._reductions.left(step, self.data_parallel),
                "numbers": self._numbers.left(step),
                "found": [a.to_json() for a in _flat(self._found.pop(step, {}))],
            }


def differences(
    assembly: ShardAssembly, judged: Iterable[tuple[int, list[Anomaly]]]
) -> Iterator[tuple[int, list[Anomaly]]]:
    """Yield, step by step, the anomalies from comparing ranks: differing replicas, and those in `judged`."""
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


def _note_reduced(reports: dict[int, RankReport], ranks: dict[int, dict[str, Side]]) -> None:
    """Use the inputs of reductions as a rank's own gradients, if no rank collects gradients before reduction."""
    if any(reports[rank].gradient is not None for rank in ranks if rank in reports):
        return
    for rank, sides in ranks.items():
        squares = [square for side in sides.values() for square in side.reduced_squares()]
        if squares and rank in reports:
            reports[rank].gradient = sum(squares)


def _note_scalar(report: RankReport, name: str, value: float) -> None:
    if name == "loss":
        report.loss = value
    elif name == STEP_SECONDS:
        report.seconds = value
    elif name == OUTSIDE_SECONDS:
        report.outside = value
    elif name == COMMUNICATION_ORDER:
        report.order = value
    elif name == COMMUNICATION_SECONDS:
        report.waited = value
