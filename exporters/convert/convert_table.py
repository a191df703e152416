"""Converts one table of one run to an event file, or continues an earlier conversion."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from trainsentry.exporters.convert.conversion_state import UNFINISHED, Choice, ConversionState, Table
from trainsentry.exporters.convert.msprobe_tables import SCOPES
from trainsentry.exporters.convert.table_tags import TableTags, Tagger
from trainsentry.exporters.convert.thinning import steps_per_bin, thinned
from trainsentry.exporters.csv.chunks import Reading, current_file
from trainsentry.exporters.csv.format import SCALARS, TableFile
from trainsentry.exporters.csv.pieces import line_count
from trainsentry.exporters.csv.reader import newest_steps
from trainsentry.exporters.csv.table_rows import RowKey, TableRows
from trainsentry.exporters.files.foreign_files import Report
from trainsentry.exporters.tensorboard.event_file import EVENTS, EventFile, tag


@dataclass(frozen=True)
class Converted:
    """The result for one table."""

    file: Path | None
    events: int
    scalars: int
    thinned: bool
    unchanged: bool = False
    too_many: bool = False
    problems: tuple[tuple[Path, int, str], ...] = ()


def our_tag(table: str, key: RowKey, column: str) -> str:
    """Return the tag of a number; msprobe's tables keep msprobe's name of the quantity."""
    quantity = SCOPES.get(key.scope, key.scope) or table
    return tag(quantity, column, key.name, max(key.micro_step, 0), scalar=table == SCALARS, vpp_stage=key.vpp_stage)


def convert_table(
    table: Table, choice: Choice, tagger: Tagger, progress: Callable[[int], None] = lambda _: None
) -> Converted:
    """Write the table's event file, or a further one with the rows added since.

    Files that only grew, and new files with later steps, are converted from where the last conversion ended. In all
    other cases, and if the table is thinned, the old event files are replaced. `progress` gets the bytes read.
    """
    problems: list[tuple[Path, int, str]] = []
    existing = tuple(file for file in map(current_file, table.files) if file.path.exists())
    if not existing:
        return Converted(None, 0, 0, thinned=False, unchanged=True)
    table = replace(table, files=existing)
    state = ConversionState.load(table)
    readings = state.go_on(table, choice)
    if readings is not None and not readings:
        return Converted(None, 0, 0, thinned=False, unchanged=True)
    if readings is not None:
        done = _write(table, choice, tagger, readings, state, problems.append, progress)
        if done is not None:
            return replace(done, problems=tuple(problems))
        problems.clear()
    state.forget(table)
    fresh = [Reading(file) for file in table.files]
    done = _write(table, choice, tagger, fresh, state, problems.append, progress)
    assert done is not None
    return replace(done, problems=tuple(problems))


def _write(
    table: Table,
    choice: Choice,
    tagger: Tagger,
    readings: list[Reading],
    state: ConversionState,
    problem: Callable[[tuple[Path, int, str]], None],
    progress: Callable[[int], None],
) -> Converted | None:
    """Write the unread rows of `readings`; None if they go back to steps that were already written."""
    numbers = TableTags(
        table.name,
        tagger,
        choice.raw_tags,
        pages=choice.pages and table.name != SCALARS,
        flat_zeros=choice.flat_zeros,
        awake=state.awake,
    )
    report: Report = lambda *found: problem(found)  # noqa: E731
    rows = _chosen(newest_steps(readings, numbers.keys, report), choice, readings, progress)
    ahead = list(islice(rows, 2))
    first = ahead[0] if ahead else None
    continued = state.last_step is not None
    if continued and first is not None and first.step < (state.last_step or 0):
        return None
    rows_a_step = min((len(step_rows) for step_rows in ahead), default=1)
    width = 1 if choice.full or first is None else steps_per_bin(_expected_steps(table.files, rows_a_step, choice))
    if continued and width > 1:
        return None
    part = EventFile(table.directory, f"{table.suffix}.{state.part}", prefix=UNFINISHED)
    events = scalars = 0
    last = state.last_step
    wall_time = max(file.path.stat().st_mtime for file in table.files)
    for kept in thinned(map(numbers.pick, chain(ahead, rows)), width):
        part.write(kept.step, wall_time, numbers.tags(kept), kept.values.tolist())
        events, scalars, last = events + 1, scalars + len(kept.slots), kept.step
    pages = [] if continued else numbers.pages()  # a picture of the new steps alone would show less than the last one
    if pages and last is not None:
        part.append(last, wall_time, pages)
    part.close()
    path = part.path.with_name(part.path.name.replace(UNFINISHED, EVENTS, 1))
    if events:
        part.path.replace(path)
    else:
        part.path.unlink()
    if events or continued:
        state.save(table, choice, readings, last, thinned=width > 1, awake=numbers.awake)
    written = path if events else None
    return Converted(written, events, scalars, width > 1, too_many=numbers.too_many)


def _chosen(
    rows: Iterator[TableRows], choice: Choice, readings: Sequence[Reading], progress: Callable[[int], None]
) -> Iterator[TableRows]:
    reported = 0
    for step_rows in rows:
        offset = sum(reading.offset for reading in readings)
        if offset != reported:
            progress(offset - reported)
            reported = offset
        if choice.has(step_rows.step):
            yield step_rows


def _expected_steps(files: Sequence[TableFile], rows_a_step: int, choice: Choice) -> int:
    """Estimate how many steps of a table are chosen, from its lines, the rows per step and its file names."""
    steps = 0.0
    for file in files:
        first, last = max(file.first, choice.first), min(file.last, file.last if choice.last is None else choice.last)
        share = max(last - first + 1, 0) / max(file.last - file.first + 1, 1)
        steps += max(line_count(file.path) - 1, 0) / max(rows_a_step, 1) * share
        if choice.last is not None:  # the last block is rarely full
            steps = max(steps, min(max(last - first + 1, 0), line_count(file.path) / max(rows_a_step, 1)))
    return int(steps) // choice.every
