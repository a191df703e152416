"""Reads a table in pieces of a few megabytes, each as arrays; a piece with a malformed line is read line by line."""

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pandas as pd

from trainsentry.exporters.csv_format import TableFile
from trainsentry.exporters.csv_lines import parse_lines
from trainsentry.exporters.json_files import Report
from trainsentry.exporters.step_rows import Ids, RowKey, RowKeys, StepRows, by_step, joined
from trainsentry.exporters.table_header import Header, parse_header

PIECE_BYTES: Final = 4 << 20
"""Bytes read at a time: enough that pandas' overhead a piece vanishes, little beside its own memory."""

LONGEST_LINE: Final = 1 << 16
"""Bytes of the longest line that is put together again over a line break inside quotes."""

_WHOLE: Final = ("vpp_stage", "step", "micro_step", "order")
"""Columns of whole numbers."""

_NOT_A_NUMBER: Final = ["nan", "NaN", "-nan", "NAN"]


@dataclass
class Reading:
    """How far a file has been read: `offset` bytes, which are `lines` whole lines behind the header, and `rows`."""

    file: TableFile
    offset: int = 0
    lines: int = 0
    rows: int = 0


def steps_in(reading: Reading, keys: RowKeys, report: Report) -> Iterator[StepRows]:
    """Yield the rows of a file from its offset on, step by step; of a row written twice, the later one.

    Steps ascend; rows that go back behind a piece that was read already are reported and left out.
    """
    held: list[StepRows] = []
    for rows in _parts(reading, keys, report):
        if held and rows.step == held[0].step:
            held.append(rows)
        elif held and rows.step < held[0].step:
            report(reading.file.path, 0, f"step {rows.step} stands after step {held[0].step}; its rows are left out")
        else:
            if held:
                yield joined(held).newest()
            held = [rows]
    if held:
        yield joined(held).newest()


def _parts(reading: Reading, keys: RowKeys, report: Report) -> Iterator[StepRows]:
    file = reading.file = as_it_is_now(reading.file)
    if file.path.suffix == ".parquet":
        yield from _parts_of_parquet(reading, keys, report)
        return
    with open_table(file.path) as stream:
        first = stream.readline()
        columns = next(csv.reader([first.decode("utf-8-sig", "replace")]), [])
        wrong, header = parse_header(columns, file.table, foreign=file.foreign)
        for message in wrong:
            report(file.path, 1, message)
        if header is None:
            return
        number = 2
        if reading.offset > len(first):
            number = _skip(stream, len(first), reading.offset)
        reading.offset = stream.tell()
        for piece in _pieces(stream):
            lines = piece.count(b"\n")
            whole = piece[: piece.rfind(b"\n") + 1]
            if len(whole) < len(piece):
                report(file.path, number + lines, "the line is cut off")
            arrays = _frame(whole, header) if whole else None
            rows, steps = (
                _rows(arrays, header, file.restart, keys)
                if arrays is not None
                else parse_lines(whole, header, file, number, keys, report)
            )
            reading.offset += len(whole)
            reading.lines += whole.count(b"\n")
            reading.rows += len(rows)
            yield from by_step(rows, steps)
            number += lines


def _parts_of_parquet(reading: Reading, keys: RowKeys, report: Report) -> Iterator[StepRows]:
    file = reading.file
    if reading.offset:  # a block that is finished: all of it was read
        return
    import pyarrow.parquet as pq

    stored = pq.ParquetFile(file.path)
    names = list(stored.schema_arrow.names)
    wrong, header = parse_header(names, file.table, foreign=file.foreign)
    for message in wrong:
        report(file.path, 1, message)
    if header is None:
        return
    texts = [name for name in names if name not in header.numbers and name not in _WHOLE]
    stored = pq.ParquetFile(file.path, read_dictionary=texts)
    for batch in stored.iter_batches(1 << 16):
        frame = batch.to_pandas()
        rows, steps = _rows(frame, header, file.restart, keys)
        reading.rows += len(frame)
        yield from by_step(rows, steps)
    reading.offset = file.path.stat().st_size


def as_it_is_now(file: TableFile) -> TableFile:
    """Return a block under the name that it has now: it may have been turned into another form meanwhile."""
    if file.path.exists() or file.path.suffix != ".csv":
        return file
    forms = (file.path.with_suffix(suffix) for suffix in (".parquet", ".csv.zst"))
    return next((replace(file, path=path) for path in forms if path.exists()), file)


def frames_of(file: TableFile) -> "Iterator[pd.DataFrame]":
    """Yield the rows of a CSV table as frames with texts as they are.

    Raises:
        ValueError: when a line of it cannot be read.

    """
    with open_table(file.path) as stream:
        columns = next(csv.reader([stream.readline().decode("utf-8-sig")]), [])
        _, header = parse_header(columns, file.table, foreign=file.foreign)
        if header is None:
            raise ValueError(f"{file.path}: the header cannot be read")
        for piece in _pieces(stream):
            frame = _frame(piece, header)
            if frame is None:
                raise ValueError(f"{file.path}: has a line that cannot be read")
            yield frame.astype({name: str for name in frame.columns if frame[name].dtype == "category"})


def open_table(path: Path) -> BinaryIO:
    """Open a CSV table, which may lie under zstd."""
    if path.suffix != ".zst":
        return path.open("rb")
    import zstandard

    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb"), closefd=True), PIECE_BYTES)


def _skip(stream: BinaryIO, at: int, offset: int) -> int:
    """Go to `offset`; return the number of the line that begins there."""
    number, left = 2, offset - at
    while left > 0:
        data = stream.read(min(left, PIECE_BYTES))
        if not data:
            break
        number, left = number + data.count(b"\n"), left - len(data)
    return number


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of a file in pieces that end with a line, or with the file."""
    rest = b""
    while data := stream.read(PIECE_BYTES):
        data = rest + data
        cut = _cut(data)
        rest = data[cut:]
        if cut:
            yield data[:cut]
    if rest:
        yield rest


def _cut(data: bytes) -> int:
    """Return where the last whole line ends; a line break inside a quoted name does not end one."""
    plain = data.rfind(b"\n") + 1
    if data.count(b'"', 0, plain) % 2 == 0:
        return plain
    cut = data.rfind(b"\n", 0, data.rfind(b'"', 0, plain)) + 1
    # A quote that is never closed must not hold back the rest of the file.
    return cut if plain - cut < LONGEST_LINE else plain


def _frame(piece: bytes, header: Header) -> "pd.DataFrame | None":
    """Return the lines of a piece as a table, or None when a line is not as it should be."""
    types: dict[str, Any] = dict.fromkeys(header.columns, "category")
    types |= dict.fromkeys(header.numbers, "float64")
    types |= {column: "int64" for column in _WHOLE if column in types}
    first = next(csv.reader([piece[: piece.find(b"\n")].decode("utf-8", "replace")]), [])
    if len(first) != len(header.columns) and b'"' not in piece[: piece.find(b"\n")]:
        return None  # pandas takes the first line's number of fields for all
    try:
        frame = pd.read_csv(
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
    except (ValueError, OverflowError):  # pandas' parser errors are ValueErrors
        return None
    ending = frame[header.ending]
    empty = ending.isna() if header.ending in header.numbers else ending == ""
    if bool(empty.any()) and not _whole(piece, len(frame), len(header.columns)):
        return None
    return frame if bool((frame["step"] >= 0).all()) else None


def _whole(piece: bytes, lines: int, columns: int) -> bool:
    """Return whether there are as many commas outside quotes as the lines need."""
    return re.sub(rb'"[^"]*"', b"", piece).count(b",") == lines * (columns - 1)


def _rows(frame: pd.DataFrame, header: Header, restart: int, keys: RowKeys) -> tuple[StepRows, Ids]:
    n = len(frame)
    zeros = np.zeros(n, np.int64)

    def numbers(column: str) -> Ids:
        return frame[column].to_numpy() if column in frame else zeros

    names, name_codes = _category(frame, header.name)
    scopes, scope_codes = _category(frame, "scope")
    shapes, shape_codes = _category(frame, "shape")
    dtypes, dtype_codes = _category(frame, "dtype")
    stages, micro_steps = numbers("vpp_stage"), numbers("micro_step")
    lowest, spread = (int(stages.min()), int(np.ptp(stages)) + 1) if n else (0, 1)
    deepest = int(micro_steps.max()) + 1 if n else 1
    combined = ((name_codes * len(scopes) + scope_codes) * spread + (stages - lowest)) * deepest + micro_steps
    found, inverse = np.unique(combined, return_inverse=True)
    ids, counted = [], "micro_step" in header.columns
    for code in found.tolist():
        rest, micro_step = divmod(code, deepest)
        rest, stage = divmod(rest, spread)
        name, scope = divmod(rest, len(scopes))
        ids.append(keys.key_id(RowKey(stage + lowest, names[name], micro_step if counted else -1, scopes[scope])))
    layouts, layout_inverse = np.unique(shape_codes * len(dtypes) + dtype_codes, return_inverse=True)
    pairs = (divmod(code, len(dtypes)) for code in layouts.tolist())
    layout_ids = [keys.layout_id((shapes[shape], dtypes[dtype])) for shape, dtype in pairs]
    rows = StepRows(
        0,
        restart,
        header.numbers,
        np.asarray(ids, np.int64)[inverse] if n else zeros,
        numbers("order"),
        np.asarray(layout_ids, np.int64)[layout_inverse] if n else zeros,
        frame[list(header.numbers)].to_numpy(),
    )
    return rows, numbers("step")


def _category(frame: pd.DataFrame, column: str) -> tuple[list[str], Ids]:
    """Return the distinct texts of a column and each row's number among them; one empty text where it is missing."""
    if column not in frame:
        return [""], np.zeros(len(frame), np.int64)
    values = frame[column].cat
    return values.categories.tolist(), values.codes.to_numpy().astype(np.int64)


def line_count(path: Path) -> int:
    """Return how many lines a table has, its header counted."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return int(pq.ParquetFile(path).metadata.num_rows) + 1
    with open_table(path) as stream:
        return sum(data.count(b"\n") for data in iter(lambda: stream.read(PIECE_BYTES), b""))
