"""Reads the CSV tables of a run: newest row of each step, malformed lines reported and left out."""

import csv
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.csv_format import LEAD, SCALAR_COLUMNS, SCALARS, TAIL, TableFile, parse_file_name
from trainsentry.exporters.json_files import Report

Number = TypeVar("Number", int, float)


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


class NotOurs(ValueError):
    """A directory or file that trainsentry did not write."""


def table_files(directory: Path) -> dict[str, list[TableFile]]:
    """Return the CSV tables in a rank's directory by table name.

    Raises:
        NotOurs: when there is none.

    """
    tables: dict[str, list[TableFile]] = defaultdict(list)
    for path in sorted(directory.glob("*.csv")):
        file = parse_file_name(path)
        if file is not None:
            tables[file.table].append(file)
    if not tables:
        raise NotOurs(f"{directory}: holds no table such as gradient_0-999.csv")
    return dict(tables)


def read_table(files: Sequence[TableFile], report: Report) -> Iterator[list[CsvRow]]:
    """Yield the rows of one table, step by step, ascending; of a step that was run twice, the newest."""
    merged = heapq.merge(*(_steps_of(file, report) for file in files), key=lambda item: item[:2])
    pending: list[CsvRow] = []
    for _, _, rows in merged:
        if pending and rows[0].step != pending[0].step:
            yield pending
        pending = rows  # of one step, a later start comes later
    if pending:
        yield pending


def _steps_of(file: TableFile, report: Report) -> Iterator[tuple[int, int, list[CsvRow]]]:
    """Yield step, start of the run, and rows of each step of a file; of a row written twice, the later one."""
    rows: dict[tuple[int, str, int], CsvRow] = {}
    step: int | None = None
    for row in read_rows(file, report):
        if step is not None and row.step != step:
            yield step, file.restart, list(rows.values())
            rows = {}
        step = row.step
        rows[row.vpp_stage, row.name, row.micro_step] = row
    if step is not None:
        yield step, file.restart, list(rows.values())


def read_rows(file: TableFile, report: Report) -> Iterator[CsvRow]:
    """Yield the rows of one file in the order they stand in it; `report` hears of every line left out."""
    with file.path.open(newline="", encoding="utf-8", errors="replace") as stream:
        lines = csv.reader(_whole_lines(stream, file.path, report))
        header = next(lines, [])
        wrong, numbers = _check_header(header, file.table)
        for message in wrong:
            report(file.path, 1, message)
        if not numbers:
            return
        at = {name: header.index(name) for name in header}
        while True:
            try:
                yield _row(file.table, next(lines), at, numbers)
            except StopIteration:
                return
            except (ValueError, csv.Error) as error:
                report(file.path, lines.line_num, str(error))


def _whole_lines(stream: TextIO, path: Path, report: Report) -> Iterator[str]:
    """Yield the lines of a file; a last line without its end was cut off in the middle and is left out."""
    for number, line in enumerate(stream, 1):
        if line.endswith("\n"):
            yield line
        else:
            report(path, number, "the line is cut off")


def _check_header(header: list[str], table: str) -> tuple[list[str], list[str]]:
    """Return what is wrong with a header, and the columns of numbers to read: none when it cannot be read."""
    known = {"value"} if table == SCALARS else {*STATISTICS, "ratio"}
    wanted = set(SCALAR_COLUMNS) if table == SCALARS else {*LEAD, *TAIL}
    numbers = [name for name in header if name in known]
    missing = [name for name in (SCALAR_COLUMNS if table == SCALARS else (*LEAD, *TAIL)) if name not in header]
    twice = sorted({name for name in header if header.count(name) > 1})
    if not header:
        return ["the file is empty, expected a header"], []
    if missing or twice or not numbers:
        what = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(twice)} twice"] * bool(twice)
        return [f"the header {' and '.join(what) or 'has no statistics'}; the file is left out"], []
    unknown = [name for name in header if name not in known | wanted]
    return [f"the header has unknown columns, which are left out: {', '.join(unknown)}"] * bool(unknown), numbers


def _row(table: str, fields: list[str], at: dict[str, int], numbers: list[str]) -> CsvRow:
    def number(name: str, kind: Callable[[str], Number]) -> Number:
        try:
            return kind(fields[at[name]])
        except ValueError:
            raise ValueError(f"{name}: {fields[at[name]]!r} is no number") from None

    if len(fields) != len(at):
        raise ValueError(f"{len(fields)} fields, expected {len(at)}")
    scalar = table == SCALARS
    return CsvRow(
        table=table,
        vpp_stage=0 if scalar else number("vpp_stage", int),
        name=fields[at["name"]],
        step=number("step", int),
        micro_step=number("micro_step", int),
        order=0 if scalar else number("order", int),
        values={name: number(name, float) for name in numbers},
        shape="[]" if scalar else fields[at["shape"]],
        dtype="float64" if scalar else fields[at["dtype"]],
    )


def rank_directories(source: Path) -> dict[str, Path]:
    """Return the directories that hold tables, by run name: `rank0`, …, `global`, or the directory itself.

    Raises:
        NotOurs: when there is none, or `source` is no directory.

    """
    if not source.is_dir():
        raise NotOurs(f"{source}: no such directory")
    found = {
        path.name: path
        for path in sorted(source.iterdir())
        if path.is_dir() and any(parse_file_name(p) for p in path.glob("*.csv"))
    }
    if not found and any(parse_file_name(p) for p in source.glob("*.csv")):
        return {source.resolve().name: source}
    if not found:
        raise NotOurs(f"{source}: holds no output of trainsentry (expected rank0/ with tables in it)")
    return found
