"""Reads the CSV tables of a run: newest row of each step, malformed lines reported and left out."""

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainsentry.exporters.csv_format import LEAD, SCALAR_COLUMNS, SCALARS, TAIL, TableFile, parse_file_name
from trainsentry.exporters.json_files import Report


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
    blocks: dict[int, list[TableFile]] = defaultdict(list)
    for file in files:
        blocks[file.last].append(file)
    for last in sorted(blocks):
        steps: dict[int, tuple[int, dict[tuple[int, str, int], CsvRow]]] = {}
        for file in sorted(blocks[last], key=lambda f: f.restart):
            for row in read_rows(file, report):
                known = steps.get(row.step)
                if known is None or known[0] < file.restart:
                    known = steps[row.step] = (file.restart, {})
                known[1][row.vpp_stage, row.name, row.micro_step] = row
        for step in sorted(steps):
            yield list(steps[step][1].values())


def read_rows(file: TableFile, report: Report) -> Iterator[CsvRow]:
    """Yield the rows of one file in the order they stand in it; `report` hears of every line left out."""
    with file.path.open(newline="", encoding="utf-8", errors="replace") as stream:
        lines = csv.reader(stream)
        header = next(lines, None)
        if header is None:
            report(file.path, 1, "the file is empty, expected a header")
            return
        wanted = SCALAR_COLUMNS if file.table == SCALARS else (*LEAD, *TAIL)
        missing = [name for name in wanted if name not in header]
        if missing:
            report(file.path, 1, f"the header lacks {', '.join(missing)}: not a table of trainsentry's")
            return
        at = {name: header.index(name) for name in header}
        numbers = [name for name in header if name not in {*LEAD, *TAIL}]
        while True:
            try:
                yield _row(file.table, next(lines), at, numbers)
            except StopIteration:
                return
            except (ValueError, csv.Error) as error:
                report(file.path, lines.line_num, str(error))


def _row(table: str, fields: list[str], at: dict[str, int], numbers: list[str]) -> CsvRow:
    if len(fields) != len(at):
        raise ValueError(f"{len(fields)} fields, expected {len(at)}")
    scalar = table == SCALARS
    return CsvRow(
        table=table,
        vpp_stage=0 if scalar else int(fields[at["vpp_stage"]]),
        name=fields[at["name"]],
        step=int(fields[at["step"]]),
        micro_step=int(fields[at["micro_step"]]),
        order=0 if scalar else int(fields[at["order"]]),
        values={name: float(fields[at[name]]) for name in numbers},
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
