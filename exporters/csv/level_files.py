"""Finds the levels of a table on disk, and the parts that show the extremes of some steps within a bound of bytes."""

import csv
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

from trainsentry.exporters.csv.chunks import header_of
from trainsentry.exporters.csv.format import TableFile
from trainsentry.exporters.csv.levels import ENDS_BUCKET, FOLDER, WIDTHS, level_folder
from trainsentry.exporters.csv.part_rows import steps_of_parts
from trainsentry.exporters.csv.pieces import MAX_LINE_BYTES, open_table
from trainsentry.exporters.csv.table_parts import TablePart, parts_of, tables_in
from trainsentry.exporters.csv.table_rows import RowKeys, TableRows
from trainsentry.exporters.files.foreign_files import InputError, Report


def levels_of(files: Sequence[TableFile]) -> list[list[TableFile]]:
    """Return the files of each level of a table, the finest first; a link that leads out of its folder is left out."""
    if not files:
        return []
    directory = files[0].path.parent
    root = directory.resolve()
    folders = [level_folder(directory, level) for level in range(len(WIDTHS))]
    return [tables_in(folder, root).get(files[0].table, []) if folder.is_dir() else [] for folder in folders]


def valid_until(files: Sequence[TableFile]) -> dict[int, int]:
    """Return, for each start of a run, the step at which a later start took over; the last has none."""
    starts = sorted({file.restart for file in files})
    return {s: min((f.first for f in files if f.restart > s), default=1 << 53) for s in starts}


@dataclass(frozen=True)
class HistoryParts:
    """Parts of a table, and the sampled steps of the widest bucket among them: 1 if every step is there."""

    parts: tuple[TablePart, ...]
    width: int

    @property
    def cost(self) -> int:
        """About how many bytes of CSV must be read."""
        return sum(part.cost for part in self.parts)


def history_parts(
    files: Sequence[TableFile], levels: Sequence[Sequence[TableFile]], steps: range, allowed: int, report: Report
) -> HistoryParts | None:
    """Return parts of at most `allowed` bytes that hold every extreme of a table at `steps`; None if no level does.

    They are the rows themselves if these fit, else the finest level that does. What a level does not reach, such as the
    newest steps, is taken from the next finer one, and at last from the rows.
    """
    whole = HistoryParts(tuple(parts_of(files, steps, report)), 1)
    if whole.cost <= allowed:
        return whole
    until = valid_until(files)
    for level, of_level in enumerate(levels):
        if of_level:
            found = HistoryParts(tuple(_covering(files, levels, until, level, steps, report)), WIDTHS[level])
            if found.cost <= allowed:
                return found
    return None


def rows_by_step(
    parts: Iterable[TablePart], keys: RowKeys, numbers: tuple[str, ...], report: Report
) -> Iterator[tuple[TableRows, bool]]:
    """Yield the rows of parts by ascending step, and whether they are a bucket's extremes instead of one step's rows.

    A step may come as both. All rows are in memory at once.
    """
    level: list[TablePart] = []
    exact: list[TablePart] = []
    for part in parts:
        (level if part.file.path.parent.parent.name == FOLDER else exact).append(part)
    either = ((zip(steps_of_parts(some, keys, numbers, report), repeat(some is level))) for some in (level, exact))
    yield from heapq.merge(*either, key=lambda pair: pair[0].step)


def _covering(
    files: Sequence[TableFile],
    levels: Sequence[Sequence[TableFile]],
    until: dict[int, int],
    level: int,
    steps: range,
    report: Report,
) -> list[TablePart]:
    """Return the parts of a level at `steps`, and those of finer levels before its first row and after its last."""
    if not len(steps):
        return []
    if level < 0:
        return parts_of(files, steps, report)
    own: list[TablePart] = []
    for file in levels[level]:
        inside = range(steps.start, min(steps.stop, until.get(file.restart, 1 << 53)))
        own += parts_of([file], inside, report) if inside else []
    known = [ends for part in own if (ends := _ends(part)) is not None]
    if not known:
        return _covering(files, levels, until, level - 1, steps, report)
    first, last = min(known, key=lambda e: e.first), max(known, key=lambda e: e.last)
    before = range(steps.start, first.first + first.begins_inside)
    after = range(last.last + last.is_bucket, steps.stop)
    return [*own, *(p for some in (before, after) for p in _covering(files, levels, until, level - 1, some, report))]


@dataclass(frozen=True)
class _Ends:
    """The steps of the first and the last row of a part, and whether each is the last of a bucket."""

    first: int
    last: int
    begins_inside: bool
    is_bucket: bool


def _ends(part: TablePart) -> _Ends | None:
    """Return the ends of a part of a level's file; None where it has no row."""
    if part.file.path.suffix != ".csv" or part.end <= part.begin:
        return None
    try:
        with open_table(part.file.path) as stream:
            header = header_of(stream.readline(MAX_LINE_BYTES), part.file, _nothing)
            if header is None or "order" not in header.columns:
                return None
            stream.seek(part.begin)
            first = _fields(stream.readline(MAX_LINE_BYTES))
            stream.seek(max(part.begin, part.end - MAX_LINE_BYTES))
            tail = stream.read(part.end - stream.tell())
            last = _fields(tail[tail.rstrip(b"\n").rfind(b"\n") + 1 :])
            step, order = header.columns.index("step"), header.columns.index("order")
            inside, whole = (int(fields[order][:16]) == ENDS_BUCKET for fields in (first, last))
            return _Ends(int(first[step][:16]), int(last[step][:16]), inside, whole)
    except (InputError, OSError, ValueError, IndexError, csv.Error):
        return None


def _fields(line: bytes) -> list[str]:
    return next(csv.reader([line.decode("utf-8", "replace")]), [])


def next_step(file: TableFile, bound: int) -> int:
    """Return from which step on a level must be made if its rows below step `bound` are to stay; 0 if it has none.

    After a whole bucket it is the next step. A bucket that reaches over the bound is made again, from its first step.
    """
    ends = [found for part in parts_of([file], range(bound), _nothing) if (found := _ends(part)) is not None]
    newest = max(ends, key=lambda e: e.last, default=None)
    return 0 if newest is None else newest.last + newest.is_bucket


def _nothing(path: Path, line: int, message: str) -> None:
    """Take no notice of a line that cannot be read."""
