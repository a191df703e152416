"""Divides a table's files into parts that can be read alone, so that a long history is never read as a whole.

A part is a range of bytes of a CSV file, a row group of a Parquet file, or a whole file under zstd. Steps ascend in a
file, so a step is found in CSV by bisection.
"""

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from trainsentry.exporters.csv.chunks import current_file, header_of
from trainsentry.exporters.csv.format import TableFile, parse_file_name, table_paths
from trainsentry.exporters.csv.header import Header
from trainsentry.exporters.csv.pieces import MAX_LINE_BYTES, open_table
from trainsentry.exporters.files.foreign_files import InputError, Report, open_file

HEAD_BYTES: Final = 1 << 22
"""Bytes read at most to see how many a step has: one step of 30,000 series."""

MIN_WINDOW: Final = 1 << 12
"""Bytes of a window at least: a page, which is read from the disk in any case."""

TRIED: Final = 3
"""Files that are tried for a table's shape: the newest may have no row yet, and another be damaged."""

EXPANSION: Final = 6
"""How many times longer a compressed file is to read than its size says: tables shrink to a sixth under zstd."""


@dataclass(frozen=True, slots=True)
class TablePart:
    """A part of a file: bytes from `begin` to `end` of CSV, row group `begin` of Parquet, or the file (`end` is -1).

    `cost` is about how many bytes of CSV must be read for it.
    """

    file: TableFile
    begin: int
    end: int
    cost: int


@dataclass(frozen=True, slots=True)
class TableShape:
    """What the first step of a table says about the others: its bytes as CSV."""

    header: Header
    step_bytes: int


def tables_in(directory: Path, root: Path) -> dict[str, list[TableFile]]:
    """Return the tables of a rank by name; a link that leads out of `root` is left out."""
    found: dict[str, list[TableFile]] = {}
    for path in table_paths(directory):
        file = parse_file_name(path)
        if file is not None and path.resolve().is_relative_to(root):
            found.setdefault(file.table, []).append(file)
    return found


def shape_of(file: TableFile, report: Report) -> TableShape | None:
    """Return the shape of a table from the start of one of its files; None where it has no readable header."""
    file = current_file(file)
    try:
        if file.path.suffix == ".parquet":
            from trainsentry.exporters.csv.parquet_parts import shape_of_parquet

            found = shape_of_parquet(file, report)
            return TableShape(*found) if found is not None else None
        with open_table(file.path) as stream:
            header = header_of(stream.readline(MAX_LINE_BYTES), file, report)
            return None if header is None else TableShape(header, _step_bytes(stream.read(HEAD_BYTES), header))
    except (InputError, OSError) as error:
        report(file.path, 0, str(error).removeprefix(f"{file.path}: "))
        return None


def shape_of_table(files: Sequence[TableFile], report: Report) -> TableShape | None:
    """Return the shape of the newest files of a table that can be read; None where the newest few cannot."""
    newest = sorted(files, key=lambda f: (f.restart, f.first), reverse=True)[:TRIED]
    return next((shape for file in newest if (shape := shape_of(file, report)) is not None), None)


def _step_bytes(head: bytes, header: Header) -> int:
    """Return the bytes of the first step of a table without its header; of all of it if there is one step alone."""
    first, at = None, 0
    while (end := head.find(b"\n", at) + 1) > 0:
        step = _step_of(head[at:end], header)
        if first is None:
            first = step
        elif step is not None and step != first:
            return max(at, 1)
        at = end
    return max(len(head), 1)


def _step_of(line: bytes, header: Header) -> int | None:
    """Return the step of a line; None for a line that is malformed, as one half of a name with a line break."""
    try:
        fields = next(csv.reader([line.decode("utf-8", "replace")]), [])
        return int(fields[header.columns.index("step")][:16]) if len(fields) == len(header.columns) else None
    except (ValueError, csv.Error):
        return None


def parts_of(files: Sequence[TableFile], steps: range, report: Report) -> list[TablePart]:
    """Return the parts of a table's files that may hold some of the steps, in the order of the run's starts."""
    found: list[TablePart] = []
    for named in sorted(files, key=lambda f: (f.restart, f.first)):
        if named.last < steps.start or named.first >= steps.stop:
            continue
        file = current_file(named)
        try:
            found += _parts(file, steps, report)
        except (InputError, OSError) as error:
            report(file.path, 0, str(error).removeprefix(f"{file.path}: "))
    return found


def _parts(file: TableFile, steps: range, report: Report) -> Iterator[TablePart]:
    if file.path.suffix == ".parquet":
        from trainsentry.exporters.csv.parquet_parts import groups_of

        yield from (TablePart(file, group, group + 1, cost) for group, cost in groups_of(file, steps))
        return
    with open_file(file.path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if file.path.suffix == ".zst":
            yield TablePart(file, 0, -1, EXPANSION * size)
            return
        header = header_of(stream.readline(MAX_LINE_BYTES), file, report)
        if header is None:
            return
        begin, end = stream.tell(), size
        if steps.start > file.first:
            begin = offset_of(stream, steps.start, header, begin, size)
        if steps.stop <= file.last:
            end = offset_of(stream, steps.stop, header, begin, size)
        if end > begin:
            yield TablePart(file, begin, end, end - begin)


def offset_of(stream: BinaryIO, step: int, header: Header, begin: int, end: int) -> int:
    """Return where the first line of `step` or of a later one begins in a CSV file; `begin` is the start of a line."""
    low, high = begin, end
    while low < high:
        middle = (low + high) // 2
        seen = _first_step(stream, middle, header, end)
        if seen is None or seen >= step:
            high = middle
        else:
            low = middle + 1
    return min(_line_start(stream, low, begin), end)


def _line_start(stream: BinaryIO, at: int, begin: int) -> int:
    """Return where the first line begins at or after `at`, and leave the stream there."""
    stream.seek(max(at - 1, begin))
    if at > begin:
        stream.readline(MAX_LINE_BYTES)
    return stream.tell()


def _first_step(stream: BinaryIO, at: int, header: Header, end: int) -> int | None:
    """Return the step of the first readable line that begins at or after `at`, before `end`."""
    _line_start(stream, at, 0)
    while stream.tell() < end:
        line = stream.readline(MAX_LINE_BYTES)
        step = _step_of(line, header) if line.endswith(b"\n") else None
        if step is not None:
            return step
    return None


def thinned(parts: Sequence[TablePart], allowed: int, least: int, most: int) -> tuple[list[TablePart], bool]:
    """Return all parts if their costs sum to at most `allowed` bytes, else some spread evenly; and whether it is all.

    Ranges of bytes are cut to windows of `least` bytes, which holds one step at least; there are about `most` windows.
    """
    total = sum(part.cost for part in parts)
    if total <= allowed:
        return list(parts), True
    size = max(least, MIN_WINDOW)
    windows = max(1, min(most, allowed // size))
    pitch = total / windows
    kept: list[TablePart] = []
    due, before = 0.0, 0
    for part in parts:
        after = before + part.cost
        if part.file.path.suffix != ".csv":
            if after > due:
                kept.append(part)
                due = max(due + pitch, after)
        else:
            while due < after:
                begin = part.begin + max(int(due) - before, 0)
                end = min(begin + size, part.end)
                kept.append(replace(part, begin=begin, end=end, cost=end - begin))
                due += max(pitch, size)
        before = after
    return kept, False


def newest_part(parts: Sequence[TablePart], size: int) -> TablePart | None:
    """Return the end of a table: the last `size` bytes of its newest CSV file, or its newest part in another form."""
    if not parts:
        return None
    last = max(parts, key=lambda p: (p.file.restart, p.file.first, p.begin))
    if last.file.path.suffix != ".csv":
        return last
    begin = max(last.end - size, last.begin)
    return replace(last, begin=begin, cost=last.end - begin)


def part_lines(part: TablePart, report: Report, chunk: int = 1 << 22) -> Iterator[tuple[Header, bytes]]:
    """Yield the header and the whole lines of a part of a CSV file, some megabytes at a time.

    A part that begins inside a line begins with the next one. A quoted line break inside a name is not looked for: the
    two halves are malformed lines.

    Raises:
        InputError: when the file cannot be read.
        OSError: when it cannot be read.

    """
    with open_table(part.file.path) as stream:
        first = stream.readline(MAX_LINE_BYTES)
        header = header_of(first, part.file, report)
        if header is None:
            return
        left = part.end - part.begin if part.end >= 0 else 1 << 62
        if part.begin > len(first):
            left -= _line_start(stream, part.begin, 0) - part.begin
        rest = b""
        while left > 0 and (data := stream.read(min(left, chunk))):
            left -= len(data)
            data = rest + data
            cut = data.rfind(b"\n") + 1
            rest = data[cut:] if len(data) - cut < MAX_LINE_BYTES else b""
            if cut:
                yield header, data[:cut]
