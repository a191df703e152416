"""Converts the CSV tables of a run to TensorBoard event files."""

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
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
    jobs: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Conversion:
    """Convert every rank below `source` into a run below `out`; malformed lines are reported and skipped.

    A run's event files of an earlier conversion are replaced. `quantities` and `steps` narrow what is
    converted; `jobs` tables are converted at a time; `progress` is told of each table that is done.

    Raises:
        NotOurs: when `source` holds no table of trainsentry's, or none of `quantities`.

    """
    runs = rank_directories(source)
    tables = [
        (run, table, parts)
        for run, directory in runs.items()
        for table, parts in table_files(directory).items()
        if not quantities or table in quantities
    ]
    if not tables:
        known = sorted({table for d in runs.values() for table in table_files(d)})
        raise NotOurs(f"{source}: no table of {', '.join(quantities)}; there are {', '.join(known)}")
    for run in runs:
        for old in (out / run).glob("events.out.tfevents.*.csv2tb.*"):
            old.unlink()
    files, events, scalars = [], 0, 0
    for (run, table, _), done in zip(tables, _convert_all(tables, out, steps, jobs), strict=True):
        for problem in done.problems:
            report(*problem)
        files.append(done.file)
        events, scalars = events + done.events, scalars + done.scalars
        progress(f"{run}/{table}")
    return Conversion(len(runs), len(tables), events, scalars, tuple(files))


@dataclass(frozen=True)
class _Converted:
    """One table that was converted, in this process or another."""

    file: Path
    events: int
    scalars: int
    problems: list[tuple[Path, int, str]]


Table = tuple[str, str, list[TableFile]]


def _convert_all(tables: list[Table], out: Path, steps: range | None, jobs: int) -> Iterator[_Converted]:
    if jobs <= 1:
        yield from (_convert(out, steps, table) for table in tables)
        return
    # A fresh interpreter a worker: forking beside the threads of a progress bar is not safe.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(_convert, out, steps), tables)


def _convert(out: Path, steps: range | None, item: Table) -> _Converted:
    run, table, parts = item
    problems: list[tuple[Path, int, str]] = []
    file = EventFile(out / run, f".csv2tb.{table}")
    wall_time = max(part.path.stat().st_mtime for part in parts)
    events = scalars = 0
    for rows in read_table(parts, lambda *problem: problems.append(problem)):
        step = rows[0].step
        if steps is not None and step not in steps:
            continue
        values = [pair for row in rows for pair in _values(table, row)]
        file.write(step, wall_time, values)
        events += 1
        scalars += len(values)
    file.close()
    return _Converted(file.path, events, scalars, problems)


def _values(table: str, row: CsvRow) -> list[tuple[str, float]]:
    scalar = table == SCALARS
    return [(tag(table, s, row.name, row.micro_step, scalar=scalar), v) for s, v in row.values.items()]
