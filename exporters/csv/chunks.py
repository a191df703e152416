"""Reads a table in pieces of 4 MiB as arrays; reads a piece with a malformed line by lines."""

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from trainsentry.collectors.histogram import HISTOGRAM
from trainsentry.exporters.csv.format import TableFile
from trainsentry.exporters.csv.header import INTEGER_COLUMNS, RANGES, Header, parse_header
from trainsentry.exporters.csv.lines import parse_lines
from trainsentry.exporters.csv.parquet import parquet_frames
from trainsentry.exporters.csv.pieces import MAX_LINE_BYTES, open_table, pieces, skip
from trainsentry.exporters.csv.table_rows import Ids, RowKey, RowKeys, TableRows, by_step, joined
from trainsentry.exporters.files.foreign_files import InputError, Report

_NOT_A_NUMBER: Final = ["nan", "NaN", "-nan", "NAN"]


@dataclass
class Reading:
    """How far a file has been read: `offset` in bytes, whole `lines` after the header, and `rows`."""

    file: TableFile
    offset: int = 0
    lines: int = 0
    rows: int = 0


def steps_in(reading: Reading, keys: RowKeys, report: Report) -> Iterator[TableRows]:
    """Yield the rows of a file from its offset on, by ascending step; of a row written twice, the later one.

    Rows of a step below one that was already yielded are reported and skipped.
    """
    held: list[TableRows] = []
    for rows in _parts(reading, keys, report):
        if held and rows.step == held[0].step:
            held.append(rows)
        elif held and rows.step < held[0].step:
            report(reading.file.path, 0, f"step {rows.step} comes after step {held[0].step}; its rows are left out")
        else:
            if held:
                yield joined(held).newest()
            held = [rows]
    if held:
        yield joined(held).newest()


def _parts(reading: Reading, keys: RowKeys, report: Report) -> Iterator[TableRows]:
    """Yield the rows of a file in file order; report where it cannot be read further."""
    file = reading.file = current_file(reading.file)
    parts = _parts_of_parquet if file.path.suffix == ".parquet" else _parts_of_csv
    try:
        yield from parts(reading, keys, report)
    except (InputError, OSError, MemoryError) as error:
        report(file.path, reading.lines + 2 if reading.offset else 1, _without(str(error), file.path))


def _without(message: str, path: Path) -> str:
    """Strip the path that a message begins with; `report` gets the path separately."""
    return message.removeprefix(f"{path}: ") or "does not fit in memory"


def _parts_of_csv(reading: Reading, keys: RowKeys, report: Report) -> Iterator[TableRows]:
    file = reading.file
    with open_table(file.path) as stream:
        first = stream.readline(MAX_LINE_BYTES)
        header = header_of(first, file, report)
        if header is None:
            return
        number = 2
        if reading.offset > len(first):
            number = skip(stream, len(first), reading.offset)
        reading.offset = stream.tell()
        for piece in pieces(stream):
            if piece.data is None:
                report(file.path, number, f"the line has more than {MAX_LINE_BYTES} bytes")
                reading.offset, reading.lines, number = reading.offset + piece.size, reading.lines + 1, number + 1
                continue
            lines = piece.data.count(b"\n")
            whole = piece.data[: piece.data.rfind(b"\n") + 1]
            if len(whole) < len(piece.data):
                report(file.path, number + lines, "the line is cut off")
            rows, steps = rows_of_lines(whole, header, file, number, keys, report)
            reading.offset, reading.lines = reading.offset + len(whole), reading.lines + lines
            reading.rows += len(rows)
            yield from by_step(rows, steps)
            number += lines


def rows_of_lines(
    lines: bytes, header: Header, file: TableFile, number: int, keys: RowKeys, report: Report
) -> tuple[TableRows, Ids]:
    """Return the rows of whole lines of a table, the first of which is line `number`, and the rows' steps, shape (n,).

    `report` gets every malformed line, which is skipped.
    """
    frame = _frame(lines, header) if lines else None
    if frame is not None:
        return _rows(frame, header, file.restart, keys)
    return parse_lines(lines, header, file, number, keys, report)


def header_of(line: bytes, file: TableFile, report: Report) -> Header | None:
    """Parse the first line of a table; report its problems and return None where the table cannot be read."""
    if len(line) >= MAX_LINE_BYTES:
        report(file.path, 1, f"the header has {MAX_LINE_BYTES} bytes or more; the file is left out")
        return None
    try:
        columns = next(csv.reader([line.decode("utf-8-sig", "replace")]), [])
    except csv.Error as error:
        report(file.path, 1, f"the header cannot be read: {error}")
        return None
    wrong, header = parse_header(columns, file.table, foreign=file.foreign)
    for message in wrong:
        report(file.path, 1, message)
    return header


def _parts_of_parquet(reading: Reading, keys: RowKeys, report: Report) -> Iterator[TableRows]:
    file = reading.file
    if reading.offset:  # Parquet blocks never grow: all of it was read
        return
    wrong: list[str] = []
    for header, frame in parquet_frames(file, wrong):
        good = _in_range(frame)
        if not bool(good.all()):
            bad = int((~good).sum())
            message = f"{bad} row{'s' * (bad != 1)} with an integer out of range"
            report(file.path, reading.rows + 2 + int(np.argmin(good)), message)
        rows, steps = _rows(frame[good], header, file.restart, keys)
        reading.rows += len(frame)
        yield from by_step(rows, steps)
    for message in wrong:
        report(file.path, 1, message)
    reading.offset = file.path.stat().st_size


def current_file(file: TableFile) -> TableFile:
    """Return a block under its current name; it may have been compacted since."""
    if file.path.exists() or file.path.suffix != ".csv":
        return file
    forms = (file.path.with_suffix(suffix) for suffix in (".parquet", ".csv.zst"))
    return next((replace(file, path=path) for path in forms if path.exists()), file)


def frames_of(file: TableFile) -> "Iterator[pd.DataFrame]":
    """Yield the rows of a CSV table as frames, with texts as plain strings.

    Raises:
        ValueError: when a line cannot be read.

    """
    with open_table(file.path) as stream:
        problems: list[str] = []
        header = header_of(stream.readline(MAX_LINE_BYTES), file, lambda *problem: problems.append(problem[2]))
        if header is None:
            raise InputError(f"{file.path}: the header cannot be read: {', '.join(problems)}")
        for piece in pieces(stream):
            frame = _frame(piece.data, header) if piece.data is not None else None
            if frame is None:
                raise InputError(f"{file.path}: has a line that cannot be read")
            yield frame.astype({name: str for name in frame.columns if frame[name].dtype == "category"})


def _frame(piece: bytes, header: Header) -> "pd.DataFrame | None":
    """Return the lines of a piece as a frame, or None when a line is malformed."""
    start = piece[: piece.find(b"\n")]
    if start.count(b",") != len(header.columns) - 1 and b'"' not in start:
        return None  # pandas applies the first line's number of fields to all
    try:
        frame = _read(piece, header, "category")
        if any(not all(isinstance(text, str) for text in frame[name].cat.categories) for name in header.texts):
            frame = _read(piece, header, "str")  # names that look like numbers: pandas read both 1 and 01 as 1
            frame = frame.astype(dict.fromkeys(header.texts, "category"))
    except (ValueError, OverflowError):  # pandas' parser errors are ValueErrors
        return None
    ending = frame[header.ending]
    empty = ending.isna() if header.ending in header.numbers else ending == ""
    if bool(empty.any()) and not _whole(piece, len(frame), len(header.columns)):
        return None
    if any(len(text) > MAX_LINE_BYTES for name in header.texts for text in frame[name].cat.categories):
        return None
    return frame if bool(_in_range(frame).all()) else None


def _read(piece: bytes, header: Header, texts: str) -> "pd.DataFrame":
    types: dict[str, Any] = dict.fromkeys(header.columns, texts)
    types |= dict.fromkeys(header.numbers, "float64")
    types |= {column: "int64" for column in INTEGER_COLUMNS if column in types}
    with np.errstate(invalid="ignore"):  # Inf in an integer column raises below
        return pd.read_csv(
            io.BytesIO(piece),
            header=None,
            names=list(header.columns),
            dtype=types,
            keep_default_na=False,
            na_values=dict.fromkeys(header.numbers, _NOT_A_NUMBER),
            index_col=False,
            skip_blank_lines=False,
            low_memory=False,
            encoding_errors="replace",
        )


def _in_range(frame: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return the rows whose integers are within RANGES, shape (n,)."""
    good = np.ones(len(frame), bool)
    for column, (lowest, largest) in RANGES.items():
        if column in frame:
            values = frame[column].to_numpy()
            good &= (values >= lowest) & (values <= largest)
    return good


def _whole(piece: bytes, lines: int, columns: int) -> bool:
    """Return whether a piece has as many commas outside quotes as its lines need."""
    return re.sub(rb'"[^"]*"', b"", piece).count(b",") == lines * (columns - 1)


def _rows(frame: pd.DataFrame, header: Header, restart: int, keys: RowKeys) -> tuple[TableRows, Ids]:
    n = len(frame)
    zeros = np.zeros(n, np.int64)

    def numbers(column: str) -> Ids:
        return frame[column].to_numpy() if column in frame else zeros

    names, name_codes = _category(frame, header.name)
    scopes, scope_codes = _category(frame, "scope")
    shapes, shape_codes = _category(frame, "shape")
    dtypes, dtype_codes = _category(frame, "dtype")
    stages, micro_steps = numbers("vpp_stage"), numbers("micro_step")
    counted = "micro_step" in header.columns
    first, inverse = _group_rows(name_codes, scope_codes, stages + 1, micro_steps + 1)
    ids = [
        keys.key_id(RowKey(int(stages[i]), names[name_codes[i]], int(micro_steps[i]) if counted else -1, scopes[scope]))
        for i, scope in zip(first.tolist(), scope_codes[first].tolist(), strict=True)
    ]
    first_layouts, layout_inverse = _group_rows(shape_codes, dtype_codes)
    layout_ids = [keys.layout_id((shapes[shape_codes[i]], dtypes[dtype_codes[i]])) for i in first_layouts.tolist()]
    rows = TableRows(
        0,
        restart,
        header.numbers,
        np.asarray(ids, np.int64)[inverse] if n else zeros,
        numbers("order"),
        np.asarray(layout_ids, np.int64)[layout_inverse] if n else zeros,
        frame[list(header.numbers)].to_numpy(),
        frame[HISTOGRAM].astype(object).to_numpy() if HISTOGRAM in frame else None,
    )
    return rows, numbers("step")


def _group_rows(*columns: Ids) -> tuple[Ids, Ids]:
    """Group rows that are equal in all columns (integers ≥ 0); return each group's first row and each row's group.

    >>> first, groups = _group_rows(np.array([3, 3, 0]), np.array([1 << 40, 1 << 40, 0]))
    >>> first.tolist(), groups.tolist()
    ([2, 0], [1, 1, 0])
    """
    combined, spread = columns[0], int(columns[0].max(initial=0)) + 1
    for column in columns[1:]:
        more = int(column.max(initial=0)) + 1
        if spread * more >= 1 << 62:  # renumber: group numbers stay below the number of rows
            combined = np.unique(combined, return_inverse=True)[1]
            column, spread = np.unique(column, return_inverse=True)[1], len(columns[0])  # noqa: PLW2901
            more = spread
        combined, spread = combined * more + column, spread * more
    _, first, groups = np.unique(combined, return_index=True, return_inverse=True)
    return first, groups


def _category(frame: pd.DataFrame, column: str) -> tuple[list[str], Ids]:
    """Return the distinct texts of a column and each row's index into them; one empty text if the column is missing."""
    if column not in frame:
        return [""], np.zeros(len(frame), np.int64)
    values = frame[column].cat
    return values.categories.tolist(), values.codes.to_numpy().astype(np.int64)
