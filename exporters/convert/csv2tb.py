"""Converts the CSV tables of a run, ours or msprobe's, to TensorBoard event files."""

import signal
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from trainsentry.collectors.series import writable
from trainsentry.exporters.convert.conversion_state import Choice, Table
from trainsentry.exporters.convert.convert_table import Converted, convert_table, our_tag
from trainsentry.exporters.convert.msprobe_tables import Tables, msprobe_tables
from trainsentry.exporters.convert.table_tags import Tagger
from trainsentry.exporters.csv.format import SCALARS
from trainsentry.exporters.csv.reader import rank_directories, table_files
from trainsentry.exporters.files.foreign_files import InputError, Report
from trainsentry.exporters.tensorboard.event_file import EVENTS, EventFile
from trainsentry.exporters.tensorboard.quantity_view import overview
from trainsentry.exporters.tensorboard.values import layout
from trainsentry.exporters.tensorboard.writer import MAX_RAW_TAGS


@dataclass(frozen=True)
class Conversion:
    """Counts of a conversion: runs, tables, and tables that were unchanged, thinned, or had too many raw tags."""

    runs: int
    tables: int
    unchanged: int
    thinned: int
    too_many: int
    events: int
    scalars: int
    files: tuple[Path, ...]


Progress = Callable[[str, int], None]
"""Receives a table, such as `rank0/gradient`, and the number of bytes read since the last call."""


def csv2tb(
    source: "Path | str",
    out: "Path | str",
    report: Report = lambda *_: None,
    *,
    quantities: Collection[str] = (),
    steps: range | None = None,
    every: int = 1,
    full: bool = False,
    raw_tags: int = MAX_RAW_TAGS,
    jobs: int = 1,
    time_start: str | None = None,
    time_end: str | None = None,
    begin: Callable[[int], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> Conversion:
    """Convert every rank below `source` into a run below `out`; report and skip malformed lines.

    A second conversion adds what files gained and replaces tables that changed otherwise. `quantities` and `steps`
    select tables and steps, `every` takes every n-th step, `time_start` and `time_end` select msprobe's directories.
    Tables with more steps than TensorBoard shows points are thinned to the lowest and highest value of each bin,
    unless `full`. Numbers over all layers, pictures of layers over steps and each layer's norm are always written; the
    other single series only if a run has at most `raw_tags` tags (-1: no limit, 0: no single series at all).
    `jobs` tables are converted at a time. `begin` gets the bytes of the chosen tables, which `progress` counts.

    Raises:
        InputError: when `source` holds no table of trainsentry or msprobe, or none of `quantities`.
        ValueError: for an empty range of steps or an invalid time.

    """
    source, out = Path(source), Path(out)
    if steps is not None and not len(steps):
        raise ValueError("steps: the range is empty")
    runs = tables_in(source, time_start, time_end)
    found = [
        Table(run, name, tuple(files), out / run, f".csv2tb.{writable(name)}")
        for run, tables in runs.items()
        for name, files in tables.items()
        if not quantities or name in quantities
    ]
    if not found:
        known = sorted({table for tables in runs.values() for table in tables})
        raise InputError(f"{source}: no table of {', '.join(quantities)}; there are {', '.join(known)}")
    begin(sum(map(_size, found)))
    raw = -1 if full or raw_tags < 0 else raw_tags // max(len(tables) for tables in runs.values())
    first, last = (steps[0], steps[-1]) if steps else (0, None)
    done = convert(found, Choice(first, last, every, full, raw, pages=True), our_tag, report, jobs, progress)
    for run in {table.run for table in found} if done.events else ():
        _write_layout(out / run, sorted({table.name for table in found if table.run == run and table.name != SCALARS}))
    return done


def _write_layout(directory: Path, quantities: list[str]) -> None:
    """Replace the layout of the overview page."""
    for old in directory.glob(f"{EVENTS}.*.csv2tb_layout"):
        old.unlink()
    file = EventFile(directory, ".csv2tb_layout")
    file.append(0, time.time(), [layout(overview(quantities))])
    file.close()


def tables_in(source: Path, time_start: str | None = None, time_end: str | None = None) -> Tables:
    """Return the files of each table of each run: msprobe's, else ours.

    Raises:
        InputError: when there is no table.

    """
    theirs = msprobe_tables(source, time_start, time_end)
    if theirs:
        return theirs
    if time_start is not None or time_end is not None:
        raise InputError(f"{source}: holds no output of msprobe's monitor from that time")
    try:
        return {run: table_files(directory) for run, directory in rank_directories(source).items()}
    except InputError as error:
        raise InputError(f"{error}, nor of msprobe" if source.is_dir() else str(error)) from None


def convert(
    tables: list[Table], choice: Choice, tagger: Tagger, report: Report, jobs: int, progress: Progress
) -> Conversion:
    """Convert tables, `jobs` at a time."""
    done: list[Converted] = []
    for result in _convert_all(tables, choice, tagger, jobs, progress):
        for problem in result.problems:
            report(*problem)
        done.append(result)
    return Conversion(
        runs=len({table.run for table in tables}),
        tables=len(tables),
        unchanged=sum(result.unchanged for result in done),
        thinned=sum(result.thinned for result in done),
        too_many=sum(result.too_many for result in done),
        events=sum(result.events for result in done),
        scalars=sum(result.scalars for result in done),
        files=tuple(result.file for result in done if result.file is not None),
    )


def _convert_all(
    tables: list[Table], choice: Choice, tagger: Tagger, jobs: int, progress: Progress
) -> Iterator[Converted]:
    if jobs <= 1:
        for table in tables:
            told = _Told(partial(progress, f"{table.run}/{table.name}"))
            result = convert_table(table, choice, tagger, told)
            told(_size(table) - told.bytes)  # what was up to date
            yield result
        return
    # Spawn, as forking is unsafe while the progress bar's threads run.
    # Ctrl-C reaches the workers too, and ends them without a word: the caller says how to go on.
    silently: dict[str, Any] = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}
    with ProcessPoolExecutor(min(jobs, len(tables)), mp_context=get_context("spawn"), **silently) as pool:
        work = pool.map(partial(convert_table, choice=choice, tagger=tagger), tables)
        for table, result in zip(tables, work, strict=True):
            progress(f"{table.run}/{table.name}", _size(table))
            yield result


class _Told:
    """Counts the bytes that it passes on."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self.bytes = 0
        self._progress = progress

    def __call__(self, read: int) -> None:
        self.bytes += read
        self._progress(read)


def _size(table: Table) -> int:
    """Return the bytes of a table's files; a live run may have compacted one meanwhile."""
    return sum(file.path.stat().st_size for file in table.files if file.path.exists())
