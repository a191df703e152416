"""Converts the CSV tables of a run to TensorBoard event files."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from trainsentry.exporters.csv_format import SCALARS, TableFile
from trainsentry.exporters.csv_reader import CsvRow, NotOurs, rank_directories, read_table, table_files
from trainsentry.exporters.event_file import EventFile, tag
from trainsentry.exporters.json_files import Report


@dataclass(frozen=True)
class Conversion:
    """What was converted: runs, tables, steps and scalars written, and the event files."""

    runs: int
    tables: int
    events: int
    scalars: int
    files: tuple[Path, ...]


def csv2tb(
    source: Path,
    out: Path,
    report: Report,
    *,
    quantities: Collection[str] = (),
    steps: range | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Conversion:
    """Convert every rank below `source` into a run below `out`; malformed lines are reported and skipped.

    A run's event files of an earlier conversion are replaced. `quantities` and `steps` narrow what is
    converted; `progress` is told of each table that is done.

    Raises:
        NotOurs: when `source` holds no table of trainsentry's, or none of `quantities`.

    """
    runs = rank_directories(source)
    files, tables, events, scalars = [], 0, 0, 0
    for run, directory in runs.items():
        target = out / run
        for old in target.glob("events.out.tfevents.*.csv2tb.*"):
            old.unlink()
        for table, parts in table_files(directory).items():
            if quantities and table not in quantities:
                continue
            file = EventFile(target, f".csv2tb.{table}")
            event_count, scalar_count = _convert(table, parts, file, report, steps)
            files.append(file.path)
            tables, events, scalars = tables + 1, events + event_count, scalars + scalar_count
            progress(f"{run}/{table}")
    if not tables:
        known = sorted({table for d in runs.values() for table in table_files(d)})
        raise NotOurs(f"{source}: no table of {', '.join(quantities)}; there are {', '.join(known)}")
    return Conversion(len(runs), tables, events, scalars, tuple(files))


def _convert(
    table: str, parts: Iterable[TableFile], file: EventFile, report: Report, steps: range | None
) -> tuple[int, int]:
    parts = list(parts)
    wall_time = max(part.path.stat().st_mtime for part in parts)
    events = scalars = 0
    for rows in read_table(parts, report):
        step = rows[0].step
        if steps is not None and step not in steps:
            continue
        values = [pair for row in rows for pair in _values(table, row)]
        file.write(step, wall_time, values)
        events += 1
        scalars += len(values)
    file.close()
    return events, scalars


def _values(table: str, row: CsvRow) -> list[tuple[str, float]]:
    scalar = table == SCALARS
    return [(tag(table, s, row.name, row.micro_step, scalar=scalar), v) for s, v in row.values.items()]
