"""Reads the rows of a part of a table: all of them, or those of one series without parsing the others."""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from trainsentry.exporters.csv.chunks import rows_of_lines
from trainsentry.exporters.csv.format import SCALARS, TableFile, quote
from trainsentry.exporters.csv.header import Header
from trainsentry.exporters.csv.table_parts import TablePart, part_lines
from trainsentry.exporters.csv.table_rows import Ids, RowKeys, TableRows, by_step
from trainsentry.exporters.files.foreign_files import InputError, Report

JOINED_BYTES: Final = 1 << 22
"""Bytes of lines that are parsed together: parsing a few lines costs as much as parsing a thousand."""


def rows_of_parts(
    parts: Iterable[TablePart], keys: RowKeys, numbers: tuple[str, ...], report: Report, name: str | None = None
) -> Iterator[tuple[TableRows, Ids]]:
    """Yield the rows of parts and their steps, shape (n,), in pieces; with `name`, the rows of that name alone.

    The rows of a piece are of one start of the run. Of Parquet, only the columns `numbers` are read, those that there
    are. `report` gets what cannot be read.
    """
    held = _Held(keys, report)
    for part in parts:
        try:
            if part.file.path.suffix == ".parquet":
                from trainsentry.exporters.csv.parquet_parts import group_rows

                yield group_rows(part.file, part.begin, keys, numbers, name)
                continue
            for header, lines in part_lines(part, report):
                found = lines if name is None else _lines_of(lines, name, header)
                if held.is_full_for(part.file, header):
                    yield held.parsed()
                held.add(part.file, header, found)
        except (InputError, OSError, MemoryError) as error:
            report(part.file.path, 0, str(error).removeprefix(f"{part.file.path}: ") or "does not fit in memory")
    if held.size:
        yield held.parsed()


def steps_of_parts(
    parts: Iterable[TablePart], keys: RowKeys, numbers: tuple[str, ...], report: Report
) -> Iterator[TableRows]:
    """Yield the rows of parts by ascending step; of a step in several, those of the newest start, or else the most.

    All of them are in memory at once.
    """
    found: dict[int, TableRows] = {}
    for rows, at in rows_of_parts(parts, keys, numbers, report):
        for of_step in by_step(rows, at):
            before = found.get(of_step.step)
            if before is None or (of_step.restart, len(of_step)) >= (before.restart, len(before)):
                found[of_step.step] = of_step
    for step in sorted(found):
        yield found.pop(step)


class _Held:
    """Lines of several parts with one header, which wait to be parsed together."""

    def __init__(self, keys: RowKeys, report: Report) -> None:
        self.size = 0
        self._keys, self._report = keys, report
        self._lines: list[bytes] = []
        self._of: tuple[TableFile, Header] | None = None

    def is_full_for(self, file: TableFile, header: Header) -> bool:
        """Return whether the lines must be parsed before others, of this file, are added."""
        if self._of is None or not self.size:
            return False
        known, columns = self._of
        return self.size >= JOINED_BYTES or known.restart != file.restart or columns != header

    def add(self, file: TableFile, header: Header, lines: bytes) -> None:
        """Add whole lines."""
        if not self.size:
            self._of = (file, header)
        self._lines.append(lines)
        self.size += len(lines)

    def parsed(self) -> tuple[TableRows, Ids]:
        """Return the rows of the lines so far, and hold none any more."""
        assert self._of is not None
        (file, header), lines = self._of, b"".join(self._lines)
        self._lines, self.size = [], 0
        return rows_of_lines(lines, header, file, 0, self._keys, lambda path, _, text: self._report(path, 0, text))


def _lines_of(lines: bytes, name: str, header: Header) -> bytes:
    """Return the lines that hold a name as a whole field; a search for bytes is far faster than reading all lines.

    Another field that equals the name brings its line along: the names must be compared once more.
    """
    before = b"\n" if header.columns[0] == header.name else b","
    needle, text = before + quote(name).encode() + b",", b"\n" + lines
    found = []
    at = text.find(needle)
    while at >= 0:
        begin = text.rfind(b"\n", 0, at + 1) + 1
        end = text.find(b"\n", at + len(needle) - 1) + 1 or len(text)
        found.append(text[begin:end])
        at = text.find(needle, end - 1)
    return b"".join(found)


def of_name(rows: TableRows, steps: Ids, keys: RowKeys, name: str, stage: int | None) -> tuple[TableRows, Ids]:
    """Return the rows of a name, of one model chunk if `stage` is given, and their steps."""
    wanted = [key.name == name and (stage is None or key.vpp_stage == stage) for key in keys.keys]
    mask = np.asarray(wanted, bool)[rows.keys]
    return rows.select(mask), steps[mask]


def numbers_of(table: str, header: Header, wanted: str) -> tuple[str, ...]:
    """Return the numeric columns to read for a statistic of a table; none if it has no such statistic."""
    statistic = "value" if table == SCALARS else wanted
    return (statistic,) if statistic in header.numbers else ()
