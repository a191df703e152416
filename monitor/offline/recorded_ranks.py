"""Compares the recorded files of several ranks: replicas, collectives, data and times."""

import heapq
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.across_ranks.conservation import UNKNOWN
from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    COMMUNICATION_CALL,
    COMMUNICATION_INPUT,
    COMMUNICATION_QUANTITIES,
    Layout,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import COLUMNS
from trainsentry.exporters.files.foreign_fields import Kind, checked, objects, sizes, text
from trainsentry.exporters.files.foreign_files import MAX_OBJECT_BYTES, InputError, read_object
from trainsentry.monitor.recorder.ranks.comparison import ComparedSeries, Comparison, differences
from trainsentry.monitor.recorder.ranks.shard_assembly import ShardAssembly, is_global

Records = Iterator[StepRecord]

_GRAPH: Final[dict[str, Kind]] = {
    "data_parallel": lambda value: value if isinstance(value, bool) else None,
    "process_groups": objects({"name": text, "ranks": sizes}, frozenset({"name", "ranks"})),
}


def differences_of_ranks(
    ranks: Mapping[int, tuple[SeriesTable, Records]], graphs: Mapping[int, Mapping[str, Any]]
) -> Iterator[Anomaly]:
    """Yield anomalies of replicas, collectives, data and times; `ranks` holds each rank's series table and records.

    `graphs` holds the ranks' `graph.json`; without it, a rank's collectives are not judged.
    """
    assembly, comparison = ShardAssembly(min(ranks), set(ranks), final=True), Comparison()
    comparison.data_parallel = {rank for rank in ranks if graphs.get(rank, {}).get("data_parallel")}
    for rank, (table, _) in ranks.items():
        assembly.use_table(rank, table)
    parts = [_parts(rank, *ranks[rank], graphs.get(rank, {})) for rank in ranks]
    merged = heapq.merge(*parts, key=lambda part: part[1].step)
    for step, records in itertools.groupby(merged, key=lambda part: part[1].step):
        for rank, record in records:
            assembly.take(rank, record)
            comparison.take(rank, ranks[rank][0], record)
        for rank in ranks:
            assembly.finish(rank, step)
        for _ in assembly.complete():  # statistics of whole tensors: global/ already has them
            pass
        for _, found in differences(assembly, comparison.judge(assembly.settled)):
            yield from found


def graph_of(directory: Path) -> dict[str, Any]:
    """Return the compared members of a rank's `graph.json`; empty if it cannot be read."""
    try:
        return checked(read_object(directory / "graph.json", MAX_OBJECT_BYTES), _GRAPH)
    except (OSError, InputError):
        return {}


def _parts(
    rank: int, table: SeriesTable, records: Records, graph: Mapping[str, Any]
) -> Iterator[tuple[int, StepRecord]]:
    """Yield the compared rows of each record, with a row for each collective call."""
    wanted, compared = np.zeros(0, bool), ComparedSeries()
    calls = _Calls(table, graph)
    for record in records:
        new = table.series[len(wanted) :]
        if new:
            wanted = np.append(wanted, [(compared.takes(s) and _is_known(s)) or is_global(s) for s in new])
        yield rank, calls.added(record.select(wanted[record.ids]))


def _is_known(series: Series) -> bool:
    return series.quantity not in COMMUNICATION_QUANTITIES or bool(series.index)


class _Calls:
    """Makes the rows of collective calls, which have no table, from their names and the process groups."""

    def __init__(self, table: SeriesTable, graph: Mapping[str, Any]) -> None:
        self.table = table
        groups: Sequence[Mapping[str, Any]] = graph.get("process_groups") or []
        self._ranks = {group["name"]: group["ranks"] for group in groups}
        self._layout = table.layout_id(Layout((), "float64", 1))
        self._of: dict[int, tuple[int, tuple[float, ...]] | None] = {}

    def added(self, record: StepRecord) -> StepRecord:
        """Return the record with a row for each call whose input it holds."""
        found = dict(made for i in record.ids.tolist() if (made := self._call(i)) is not None)
        if not found:
            return record
        values = np.full((len(found), COLUMNS), np.nan)
        values[:, :6] = list(found.values())
        return StepRecord(
            step=record.step,
            rank=record.rank,
            ids=np.append(record.ids, np.array(list(found), np.int32)),
            layouts=np.append(record.layouts, np.full(len(found), self._layout, np.int32)),
            values=np.concatenate([record.values, values]),
            skipped=record.skipped,
        )

    def _call(self, series_id: int) -> tuple[int, tuple[float, ...]] | None:
        if series_id not in self._of:
            self._of[series_id] = self._made(self.table.series[series_id])
        return self._of[series_id]

    def _made(self, series: Series) -> tuple[int, tuple[float, ...]] | None:
        if series.quantity != COMMUNICATION_INPUT:
            return None
        _, group, call = series.index.split("|")
        ranks = self._ranks.get(group)
        if not ranks:
            return None
        number = float(re.findall(r"\d+", call)[-1])  # all ranks number the calls of a step the same way
        call_id = self.table.series_id(Series(call, COMMUNICATION_CALL, 0, series.index))
        return call_id, (number, np.nan, np.nan, float(len(ranks)), float(min(ranks)), float(UNKNOWN))
