"""Converts one table of one run to an event file, or goes on with one that was converted before."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from glob import escape
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.csv_chunks import Reading, as_it_is_now
from trainsentry.exporters.csv_format import SCALARS, TableFile
from trainsentry.exporters.csv_pieces import line_count
from trainsentry.exporters.csv_reader import newest_steps
from trainsentry.exporters.event_file import EVENTS, EventFile, tag
from trainsentry.exporters.json_files import Report, replace_json
from trainsentry.exporters.msprobe_tables import SCOPES
from trainsentry.exporters.step_rows import RowKey, StepRows
from trainsentry.exporters.table_tags import TableTags, Tagger
from trainsentry.exporters.thinning import bin_width, thinned

STATE_VERSION: Final = 3

_UNFINISHED: Final = ".converting"
"""Begins the name of an event file that is being written, which TensorBoard does not look at."""


@dataclass(frozen=True)
class Choice:
    """What of a table is converted: steps `first` to `last`, every `every`-th, thinned unless `full`.

    With more than `raw_tags` tags (-1: any number) only numbers over all layers are written; they, and pictures of
    layers over steps, with `pages`.
    """

    first: int = 0
    last: int | None = None
    every: int = 1
    full: bool = False
    raw_tags: int = -1
    pages: bool = False

    def has(self, step: int) -> bool:
        """Return whether a step is converted."""
        return step >= self.first and (self.last is None or step <= self.last) and step % self.every == 0


@dataclass(frozen=True)
class Table:
    """A table to be converted: its run, its name, its files, and the directory of its event files."""

    run: str
    name: str
    files: tuple[TableFile, ...]
    directory: Path
    suffix: str


@dataclass(frozen=True)
class Converted:
    """What was done with a table."""

    file: Path | None
    events: int
    scalars: int
    thinned: bool
    unchanged: bool = False
    too_many: bool = False
    problems: tuple[tuple[Path, int, str], ...] = ()


def our_tag(table: str, key: RowKey, column: str) -> str:
    """Return the tag of a number in a table of ours, or in one of msprobe's under msprobe's word for the quantity."""
    quantity = SCOPES.get(key.scope, key.scope) or table
    return tag(quantity, column, key.name, max(key.micro_step, 0), scalar=table == SCALARS, vpp_stage=key.vpp_stage)


def convert_table(
    table: Table, choice: Choice, tagger: Tagger, progress: Callable[[int], None] = lambda _: None
) -> Converted:
    """Write the table's event file, or what has come since it was written.

    Files that only grew, and new ones with later steps, are gone on with; else, and where the table is thinned, the
    event files of before are replaced. `progress` hears of bytes that were read.
    """
    problems: list[tuple[Path, int, str]] = []
    there = tuple(file for file in map(as_it_is_now, table.files) if file.path.exists())
    if not there:
        return Converted(None, 0, 0, thinned=False, unchanged=True)
    table = replace(table, files=there)
    state = _State.load(table)
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
    state: "_State",
    problem: Callable[[tuple[Path, int, str]], None],
    progress: Callable[[int], None],
) -> Converted | None:
    """Write what `readings` still have; None when that goes back behind what was written."""
    numbers = TableTags(table.name, tagger, choice.raw_tags, pages=choice.pages and table.name != SCALARS)
    report: Report = lambda *what: problem(what)  # noqa: E731
    rows = _chosen(newest_steps(readings, numbers.keys, report), choice, readings, progress)
    ahead = list(islice(rows, 2))
    first = ahead[0] if ahead else None
    going_on = state.last_step is not None
    if going_on and first is not None and first.step < (state.last_step or 0):
        return None
    rows_a_step = min((len(step_rows) for step_rows in ahead), default=1)
    width = 1 if choice.full or first is None else bin_width(_expected_steps(table.files, rows_a_step, choice))
    if going_on and width > 1:
        return None
    part = EventFile(table.directory, f"{table.suffix}.{state.part}", prefix=_UNFINISHED)
    events = scalars = 0
    last = state.last_step
    wall_time = max(file.path.stat().st_mtime for file in table.files)
    for picked in thinned(map(numbers.pick, chain(ahead, rows)), width):
        part.write(picked.step, wall_time, numbers.tags(picked), picked.values.tolist())
        events, scalars, last = events + 1, scalars + len(picked.slots), picked.step
    pages = [] if going_on else numbers.pages()  # a picture of what has come alone would tell less than the last one
    if pages and last is not None:
        part.append(last, wall_time, pages)
    part.close()
    path = part.path.with_name(part.path.name.replace(_UNFINISHED, EVENTS, 1))
    if events:
        part.path.replace(path)
    else:
        part.path.unlink()
    if events or going_on:
        state.save(table, choice, readings, last, thinned=width > 1)
    written = path if events else None
    return Converted(written, events, scalars, width > 1, too_many=numbers.too_many)


def _chosen(
    rows: Iterator[StepRows], choice: Choice, readings: Sequence[Reading], progress: Callable[[int], None]
) -> Iterator[StepRows]:
    told = 0
    for step_rows in rows:
        offset = sum(reading.offset for reading in readings)
        if offset != told:
            progress(offset - told)
            told = offset
        if choice.has(step_rows.step):
            yield step_rows


def _expected_steps(files: Sequence[TableFile], rows_a_step: int, choice: Choice) -> int:
    """Return about how many steps of a table are chosen, from its lines, the rows of one step and its files' names."""
    steps = 0.0
    for file in files:
        first, last = max(file.first, choice.first), min(file.last, file.last if choice.last is None else choice.last)
        share = max(last - first + 1, 0) / max(file.last - file.first + 1, 1)
        steps += max(line_count(file.path) - 1, 0) / max(rows_a_step, 1) * share
        if choice.last is not None:  # the last block is seldom full
            steps = max(steps, min(max(last - first + 1, 0), line_count(file.path) / max(rows_a_step, 1)))
    return int(steps) // choice.every


def _block(file: TableFile) -> str:
    """Return what names a block, in whichever form it lies."""
    return str(file.path.with_name(file.path.name.partition(".csv")[0].removesuffix(".parquet")))


def _event_files(table: Table) -> list[Path]:
    return list(table.directory.glob(f"{EVENTS}.*{escape(table.suffix)}.*"))


class _State:
    """What was converted before, in a file beside the event files, so that converting again goes on."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self.data = data

    @classmethod
    def load(cls, table: Table) -> "_State":
        path = table.directory / f"{table.suffix}.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, data if data.get("version") == STATE_VERSION else {})
        except (OSError, ValueError, AttributeError):
            return cls(path, {})

    @property
    def last_step(self) -> int | None:
        """The last step that was written."""
        return self.data.get("last_step")

    @property
    def part(self) -> int:
        """The number of the coming event file."""
        return int(self.data.get("parts", 0))

    def go_on(self, table: Table, choice: Choice) -> list[Reading] | None:
        """Return what is still to be read, nothing where all was; None where it is to be begun anew."""
        if self.data.get("choice") != asdict(choice) or not self._events(table):
            return None
        known = self.data["files"]
        if not known.keys() <= {_block(file) for file in table.files}:
            return None
        readings = []
        for file in table.files:
            offset, lines, rows = known.get(_block(file), (0, 0, 0))
            if file.path.suffix != ".csv" and rows:  # a block that was finished, and then turned into another form
                if line_count(file.path) - 1 != (rows if file.path.suffix == ".parquet" else lines or rows):
                    return None
                continue
            size = file.path.stat().st_size
            if size < offset:
                return None
            if size > offset:
                readings.append(Reading(file, offset, lines, rows))
        return None if readings and self.data.get("thinned") else readings

    def forget(self, table: Table) -> None:
        """Remove what was converted before, and what a conversion that was cut off has left."""
        self.data = {}
        for old in [*_event_files(table), *table.directory.glob(f"{_UNFINISHED}.*{escape(table.suffix)}.*")]:
            old.unlink()

    def save(
        self, table: Table, choice: Choice, readings: Sequence[Reading], last_step: int | None, *, thinned: bool
    ) -> None:
        """Note what has been converted."""
        files = dict(self.data.get("files", {})) | {_block(r.file): (r.offset, r.lines, r.rows) for r in readings}
        written = len(_event_files(table))
        data = {"version": STATE_VERSION, "choice": asdict(choice), "files": files, "last_step": last_step}
        replace_json(self.path, data | {"parts": self.part + 1, "written": written, "thinned": thinned})

    def _events(self, table: Table) -> bool:
        return len(_event_files(table)) == self.data.get("written")
