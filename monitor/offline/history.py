"""Reads a recorded run back as step records, and runs the same detection on them."""

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.incidents.incident_log import IncidentLog
from trainsentry.anomaly.rules.registry import detectors
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import PARAMETER, Series, SeriesTable
from trainsentry.exporters.csv.format import TableFile, table_paths
from trainsentry.exporters.csv.reader import read_steps, table_files
from trainsentry.exporters.engine import Mapper, map_locally
from trainsentry.exporters.files.foreign_fields import objects, whole
from trainsentry.exporters.files.foreign_files import MAX_OBJECT_BYTES, InputError, Report, read_lines, read_object
from trainsentry.exporters.run_reader import read_run
from trainsentry.monitor.offline.recorded_ranks import differences_of_ranks, graph_of
from trainsentry.monitor.offline.recorded_table import RecordedRows, RecordedTable

_STARTS: Final = objects({"restart": whole, "start_step": whole}, frozenset({"restart", "start_step"}))

ACROSS_RANKS: Final = frozenset(d.name for d in detectors() if d.compares_ranks)
"""Detectors that compare ranks; tables lack the bits, call orders and missing ranks that they need."""


def rank_number(directory: Path) -> int:
    """Return the rank in a directory's name `rank<r>`, or 0."""
    match = re.fullmatch(r"rank(\d{1,9})", directory.name, re.ASCII)
    return int(match[1]) if match else 0


def records_of(directory: Path, table: SeriesTable, report: Report) -> Iterator[StepRecord]:
    """Yield the records of one rank's tables, step by step; define their series and layouts in `table`.

    Raises:
        InputError: when the directory holds no table.

    """
    rank = rank_number(directory)
    tables = [_in_table(table, RecordedTable(name), files, report) for name, files in table_files(directory).items()]
    merged = heapq.merge(*tables, key=lambda item: item[0])
    step: int | None = None
    parts: list[RecordedRows] = []
    for number, part in merged:
        if step is not None and number != step:
            yield _record(step, rank, parts)
            parts = []
        step = number
        parts.append(part)
    if step is not None:
        yield _record(step, rank, parts)


def anomalies_in(directory: Path, report: Report) -> dict[int, list[Anomaly]]:
    """Return a rank's recorded anomalies by start of the run; report malformed lines.

    If a later start ran a step again, the earlier start's anomalies of that step are dropped.
    """
    path = directory / "anomalies.jsonl"
    found: dict[int, list[Anomaly]] = {}
    for number, line in read_lines(path, report):
        try:
            found.setdefault(whole(line.get("restart")) or 0, []).append(Anomaly.from_json(line))
        except (KeyError, TypeError, ValueError) as error:
            report(path, number, f"not an anomaly: {type(error).__name__}: {error}")
    first_steps = _first_steps(directory.parent / "run.json")
    for restart, anomalies in found.items():
        later = min((step for start, step in first_steps.items() if start > restart), default=None)
        found[restart] = [a for a in anomalies if later is None or a.step < later]
    return found


def _first_steps(path: Path) -> dict[int, int]:
    """Return the first step of each start of a run by its number, from `run.json`."""
    try:
        starts = _STARTS(read_object(path).get("starts")) or []
    except (InputError, OSError):
        return {}
    return {start["restart"]: start["start_step"] for start in starts}


def diagnose(
    directories: Iterable[Path],
    report: Report,
    steps: range | None = None,
    mapper: Mapper = map_locally,
    *,
    anew: bool = False,
) -> tuple[Incident, ...]:
    """Rank the incidents of recorded ranks: from their anomalies, else from their tables.

    `mapper` applies the reader to the ranks. With `anew` existing tables are judged again; of the recorded anomalies
    only those from the comparison of ranks are kept.

    Raises:
        InputError: when a directory holds neither.

    """
    table = SeriesTable()
    starts: dict[int, list[Anomaly]] = {}
    directories = list(directories)
    for directory, (found, problems) in zip(directories, mapper(partial(_judged, anew=anew), directories), strict=True):
        _define_parameters(directory, table, report)
        for problem in problems:
            report(*problem)
        for restart, anomalies in found.items():
            starts.setdefault(restart, []).extend(anomalies)
    starts.setdefault(0, []).extend(_differences(directories))
    log = IncidentLog(table)
    for restart in sorted(starts):
        by_step: dict[int, list[Anomaly]] = {}
        for anomaly in starts[restart]:
            if steps is None or anomaly.step in steps:
                by_step.setdefault(anomaly.step, []).append(anomaly)
        for step in sorted(by_step):
            log.observe(step, by_step[step])
        log.close_current()
    return tuple(log.incidents.values())


def _differences(directories: Sequence[Path]) -> Iterator[Anomaly]:
    """Yield the anomalies from comparing ranks, if no rank has recorded anomalies."""
    ranks = {rank_number(d): d for d in directories if table_paths(d)}
    if len(ranks) < 2 or any((d / "anomalies.jsonl").is_file() for d in directories):
        return
    ignore: Report = lambda *_: None  # noqa: E731 - problems were reported when each rank was judged
    tables = {rank: SeriesTable() for rank in ranks}
    records = {rank: (tables[rank], records_of(d, tables[rank], ignore)) for rank, d in ranks.items()}
    yield from differences_of_ranks(records, {rank: graph_of(d) for rank, d in ranks.items()})


def _judged(directory: Path, *, anew: bool) -> tuple[dict[int, list[Anomaly]], list[tuple[Path, int, str]]]:
    """Return a rank's anomalies by start of the run, and the problems of its files."""
    problems: list[tuple[Path, int, str]] = []
    report: Report = lambda *problem: problems.append(problem)  # noqa: E731
    recorded = anomalies_in(directory, report) if (directory / "anomalies.jsonl").is_file() else None
    if recorded is not None and not (anew and table_paths(directory)):
        return recorded, problems
    found = [a for anomalies in (recorded or {}).values() for a in anomalies if a.detector in ACROSS_RANKS]
    if table_paths(directory):
        table = SeriesTable()
        detection = Detection(table, per_micro_step=_has_micro_steps(directory.parent))
        for record in records_of(directory, table, report):
            found.extend(detection.judge(record))
    return {0: found} if found else {}, problems


def _has_micro_steps(root: Path) -> bool:
    """Return whether a run's configuration asked for the gradients after each micro-step."""
    value: object = read_run(root).settings.get("configuration")
    for key in ("collect", "gradients", "per_micro_step"):
        value = value.get(key) if isinstance(value, dict) else None
    return value is True


def _in_table(
    table: SeriesTable, recorded: RecordedTable, files: Sequence[TableFile], report: Report
) -> Iterator[tuple[int, RecordedRows]]:
    for rows in read_steps(files, recorded.keys, report):
        yield rows.step, recorded.rows(rows, table)


def _record(step: int, rank: int, parts: list[RecordedRows]) -> StepRecord:
    """Merge the rows of all tables at a step into one record, in execution order."""
    placed = np.concatenate([part.orders for part in parts if not part.unplaced] or [np.zeros(0, np.int64)])
    orders = [_free_orders(placed, len(part.ids)) if part.unplaced else part.orders for part in parts]
    order = np.argsort(np.concatenate(orders), kind="stable")
    return StepRecord(
        step=step,
        rank=rank,
        ids=np.concatenate([part.ids for part in parts])[order],
        layouts=np.concatenate([part.layouts for part in parts])[order],
        values=np.concatenate([part.values for part in parts])[order],
        skipped=any(part.skipped for part in parts),
    )


def _free_orders(placed: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return the orders of rows without one: the numbers that the other tables skip.

    >>> _free_orders(np.array([1, 2, 5]), 3).tolist()
    [0, 3, 4]
    """
    return np.setdiff1d(np.arange(len(placed) + count), placed)[:count]


def _define_parameters(directory: Path, table: SeriesTable, report: Report) -> None:
    """Define all parameters from `graph.json`, if it exists, so that the ranker knows their number."""
    path = directory / "graph.json"
    try:
        parameters = read_object(path, MAX_OBJECT_BYTES).get("parameters")
    except FileNotFoundError:
        return
    except (InputError, OSError) as error:
        report(path, 0, str(error).removeprefix(f"{path}: "))
        return
    for name, module in parameters.items() if isinstance(parameters, dict) else ():
        if isinstance(module, str):
            table.series_id(Series(name, PARAMETER, module=module))
