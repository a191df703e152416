"""A recorded run as step records again, so that the same detection works on what lies on disk."""

import heapq
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.incident_log import IncidentLog
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_QUANTITIES,
    FOUND_INF,
    PARAMETER,
    SKIPPED,
    Layout,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import COLUMNS, INFS, NANS, STATISTICS, VALUE
from trainsentry.exporters.csv_format import SCALARS
from trainsentry.exporters.csv_reader import CsvRow, NotOurs, read_table, table_files
from trainsentry.exporters.json_files import Report, read_lines

# The last part named input or output is ours; earlier ones belong to the user's module names.
_ACTIVATION = re.compile(r"(?:(?P<module>.*?)(?:@\d+)?\.)?(?:input|output)\.(?P<path>(?:(?!input\.|output\.).)+)")


def rank_number(directory: Path) -> int:
    """Return the rank in a directory's name `rank<r>`, or 0."""
    match = re.fullmatch(r"rank(\d+)", directory.name)
    return int(match[1]) if match else 0


def records_of(directory: Path, table: SeriesTable, report: Report) -> Iterator[StepRecord]:
    """Yield the records of one rank's tables, step by step; series and layouts are defined in `table`.

    Raises:
        NotOurs: when the directory holds no table.

    """
    rank = rank_number(directory)
    tables = [read_table(files, report) for files in table_files(directory).values()]
    merged = heapq.merge(*(_by_step(t) for t in tables), key=lambda item: item[0])
    step: int | None = None
    rows: list[CsvRow] = []
    for number, part in merged:
        if step is not None and number != step:
            yield _record(step, rank, rows, table)
            rows = []
        step = number
        rows += part
    if step is not None:
        yield _record(step, rank, rows, table)


def anomalies_in(directory: Path, report: Report) -> dict[int, list[Anomaly]]:
    """Return the anomalies that a rank has written, by start of the run; malformed lines are reported.

    Of steps that a later start ran again, the earlier start's are left out.
    """
    path = directory / "anomalies.jsonl"
    found: dict[int, list[Anomaly]] = {}
    for number, line in read_lines(path, report):
        try:
            found.setdefault(int(line.get("restart", 0)), []).append(Anomaly.from_json(line))
        except (KeyError, TypeError, ValueError) as error:
            report(path, number, f"not an anomaly: {type(error).__name__}: {error}")
    began = _starts(directory.parent / "run.json")
    for restart, anomalies in found.items():
        later = min((step for start, step in began.items() if start > restart), default=None)
        found[restart] = [a for a in anomalies if later is None or a.step < later]
    return found


def _starts(path: Path) -> dict[int, int]:
    """Return the first step of each start of a run, by its number, as far as `run.json` says."""
    try:
        return {int(s["restart"]): int(s["start_step"]) for s in json.loads(path.read_text(encoding="utf-8"))["starts"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def diagnose(directories: Iterable[Path], report: Report, steps: range | None = None) -> tuple[Incident, ...]:
    """Rank what was recorded by one or several ranks: from their anomalies, else from their tables.

    Raises:
        NotOurs: when a directory holds neither.

    """
    table = SeriesTable()
    starts: dict[int, list[Anomaly]] = {}
    for directory in directories:
        _define_parameters(directory, table)
        if (directory / "anomalies.jsonl").is_file():
            for restart, anomalies in anomalies_in(directory, report).items():
                starts.setdefault(restart, []).extend(anomalies)
        elif any(directory.glob("*_*-*.csv")):
            own = SeriesTable()
            detection = Detection(own)
            for record in records_of(directory, own, report):
                starts.setdefault(0, []).extend(detection.judge(record))
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


def _by_step(table: Iterator[list[CsvRow]]) -> Iterator[tuple[int, list[CsvRow]]]:
    return ((rows[0].step, rows) for rows in table)


def _record(step: int, rank: int, rows: list[CsvRow], table: SeriesTable) -> StepRecord:
    rows = sorted(rows, key=lambda row: row.order)
    values = np.full((len(rows), COLUMNS), np.nan)
    values[:, [NANS, INFS]] = 0.0  # a table without counts says nothing against its values
    for position, row in enumerate(rows):
        for name, value in row.values.items():
            values[position, STATISTICS.index(name) if name in STATISTICS else VALUE] = value
        if row.table == SCALARS:
            value = row.values["value"]
            finite = np.isfinite(value)
            values[position, :3] = value if finite else np.nan
            values[position, 3:6] = abs(value) if finite else 0.0, np.isnan(value), np.isinf(value)
    return StepRecord(
        step=step,
        rank=rank,
        ids=np.asarray([table.series_id(_series(row)) for row in rows], np.int32),
        layouts=np.asarray([table.layout_id(_layout(row)) for row in rows], np.int32),
        values=values,
        skipped=any(row.name in {SKIPPED, FOUND_INF} and row.values.get("value", 0) > 0 for row in rows),
    )


def _series(row: CsvRow) -> Series:
    if row.table == SCALARS:
        return Series(row.name, row.name, row.micro_step, scalar=True)
    if row.table in ACTIVATION_QUANTITIES:
        match = _ACTIVATION.fullmatch(row.name)
        module, path = (match["module"] or "", match["path"]) if match else (row.name, "0")
        return Series(row.name, row.table, row.micro_step, path, module, row.vpp_stage)
    return Series(row.name, row.table, row.micro_step, "", row.name.rpartition(".")[0], row.vpp_stage)


def _layout(row: CsvRow) -> Layout:
    shape = tuple(int(n) for n in re.findall(r"\d+", row.shape))
    return Layout(shape, row.dtype, int(np.prod(shape, dtype=np.int64)))


def _define_parameters(directory: Path, table: SeriesTable) -> None:
    """Tell the ranker how many parameters there are, from `graph.json` where it exists."""
    path = directory / "graph.json"
    if not path.is_file():
        return
    try:
        parameters = json.loads(path.read_text(encoding="utf-8"))["parameters"]
    except (ValueError, KeyError) as error:
        raise NotOurs(f"{path}: {error}") from error
    for name, module in parameters.items():
        table.series_id(Series(name, PARAMETER, module=module))
