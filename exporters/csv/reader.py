"""Reads the CSV tables of a run: keeps the newest rows of each step, reports and skips malformed lines."""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainsentry.exporters.csv.chunks import Reading, steps_in
from trainsentry.exporters.csv.format import SCALARS, TableFile, parse_file_name, table_paths
from trainsentry.exporters.csv.table_rows import RowKeys, TableRows
from trainsentry.exporters.files.foreign_files import InputError, Report


@dataclass(frozen=True, slots=True)
class CsvRow:
    """One row: `values` by column name holds the statistics (and `ratio`, or `value` of a scalar)."""

    table: str
    vpp_stage: int
    name: str
    step: int
    micro_step: int
    order: int
    values: dict[str, float]
    shape: str
    dtype: str


def table_files(directory: Path) -> dict[str, list[TableFile]]:
    """Return the CSV tables in a rank's directory by table name.

    Raises:
        InputError: when there is none.

    """
    tables: dict[str, list[TableFile]] = defaultdict(list)
    for path in table_paths(directory):
        file = parse_file_name(path)
        if file is not None:
            tables[file.table].append(file)
    if not tables:
        raise InputError(f"{directory}: holds no table such as gradient_0-999.csv")
    return dict(tables)


def read_steps(files: Sequence[TableFile], keys: RowKeys, report: Report) -> Iterator[TableRows]:
    """Yield the rows of one table by ascending step; of a step that ran twice, the newest."""
    return newest_steps([Reading(file) for file in files], keys, report)


def newest_steps(readings: Sequence[Reading], keys: RowKeys, report: Report) -> Iterator[TableRows]:
    """Yield the rows of files, each read on from its offset; of a step in several files, those of the newest start.

    Files whose steps do not overlap are opened one after the other.
    """
    pending: TableRows | None = None
    for group in _overlapping(readings):
        streams = [steps_in(reading, keys, report) for reading in group]
        merged = heapq.merge(*streams, key=lambda rows: (rows.step, rows.restart))
        for rows in merged if len(streams) > 1 else streams[0]:
            if pending is not None and rows.step != pending.step:
                yield pending
            pending = rows  # within a step, later starts come later
    if pending is not None:
        yield pending


def _overlapping(readings: Sequence[Reading]) -> Iterator[list[Reading]]:
    """Group files whose step ranges overlap, by their names; groups are in step order."""
    group: list[Reading] = []
    last = -1
    for reading in sorted(readings, key=lambda r: (r.file.first, r.file.restart)):
        if group and reading.file.first > last:
            yield group
            group = []
        group.append(reading)
        last = max(last, reading.file.last)
    if group:
        yield group


def read_table(files: Sequence[TableFile], report: Report) -> Iterator[list[CsvRow]]:
    """Yield the rows of one table as objects, step by step; see `read_steps`."""
    keys = RowKeys()
    table = files[0].table if files else ""
    return (rows_of(rows, keys, table) for rows in read_steps(files, keys, report))


def rows_of(rows: TableRows, keys: RowKeys, table: str) -> list[CsvRow]:
    """Return the rows of a step as objects."""
    scalar = table == SCALARS
    found = []
    columns = zip(rows.keys.tolist(), rows.orders.tolist(), rows.layouts.tolist(), rows.values.tolist(), strict=True)
    for key_id, order, layout, values in columns:
        key = keys.keys[key_id]
        shape, dtype = ("[]", "float64") if scalar else keys.layouts[layout]
        numbers = dict(zip(rows.numbers, values, strict=True))
        found.append(CsvRow(table, key.vpp_stage, key.name, rows.step, key.micro_step, order, numbers, shape, dtype))
    return found


def rank_directories(source: Path) -> dict[str, Path]:
    """Return the directories that hold tables, by run name: `rank0`, …, `global`, or the directory itself.

    Raises:
        InputError: when there is none, or `source` is no directory.

    """
    if not source.is_dir():
        raise InputError(f"{source}: no such directory")
    found = {path.name: path for path in sorted(source.iterdir()) if path.is_dir() and table_paths(path)}
    if not found and table_paths(source):
        return {source.resolve().name: source}
    if not found:
        raise InputError(f"{source}: holds no output of trainsentry (expected rank0/ with tables in it)")
    return found
