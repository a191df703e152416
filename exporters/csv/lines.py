"""Reads a piece of a table line by line and reports malformed lines; used where pandas cannot read the piece."""

import csv
import io
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from trainsentry.collectors.histogram import HISTOGRAM
from trainsentry.exporters.csv.format import TableFile
from trainsentry.exporters.csv.header import RANGES, Header
from trainsentry.exporters.csv.pieces import MAX_LINE_BYTES
from trainsentry.exporters.csv.table_rows import Ids, RowKey, RowKeys, TableRows
from trainsentry.exporters.files.foreign_files import Report
from trainsentry.exporters.short_text import shorten

Number = TypeVar("Number", int, float)


def parse_lines(
    piece: bytes, header: Header, file: TableFile, first_line: int, keys: RowKeys, report: Report
) -> tuple[TableRows, Ids]:
    """Return the rows of a piece of a file and their steps; `report` gets every line that is skipped."""
    at = {name: i for i, name in enumerate(header.columns)}
    lines = csv.reader(io.StringIO(piece.decode("utf-8", "replace"), newline=""))
    found: list[_Fields] = []
    before = 0
    while True:
        try:
            fields = next(lines)
            found.append(_row(fields, at, header, keys))
        except StopIteration:
            break
        except (ValueError, csv.Error) as error:
            report(file.path, first_line + before, str(error))
        before = lines.line_num
    columns = (list(column) for column in zip(*found, strict=True)) if found else ([],) * 6
    steps, ids, orders, layouts, values, histograms = columns
    rows = TableRows(
        0,
        file.restart,
        header.numbers,
        np.asarray(ids, np.int64),
        np.asarray(orders, np.int64),
        np.asarray(layouts, np.int64),
        np.asarray(values, np.float64).reshape(len(found), len(header.numbers)),
        np.asarray(histograms, object) if HISTOGRAM in at else None,
    )
    return rows, np.asarray(steps, np.int64)


_Fields = tuple[int, int, int, int, list[float], str]
"""Step, key, order, layout, numbers and histogram of a line."""


def _row(fields: list[str], at: dict[str, int], header: Header, keys: RowKeys) -> _Fields:
    """Return what a line says.

    Raises:
        ValueError: when it is malformed.

    """

    def number(name: str, kind: Callable[[str], Number]) -> Number:
        try:
            return kind(fields[at[name]])
        except ValueError:
            raise ValueError(f"{name}: {shown(fields[at[name]])} is not a number") from None

    def whole(name: str) -> int:
        if name not in at:
            return 0
        value = number(name, int)
        lowest, largest = RANGES[name]
        if not lowest <= value <= largest:
            raise ValueError(f"{name}: {shown(fields[at[name]])} is not between {lowest} and {largest}")
        return value

    def text(name: str) -> str:
        return fields[at[name]] if name in at else ""

    def shown(field: str) -> str:
        return repr(shorten(field, 40))

    if len(fields) != len(at):
        raise ValueError(f"{len(fields)} fields, expected {len(at)}")
    if sum(map(len, fields)) > MAX_LINE_BYTES:
        raise ValueError(f"the line has more than {MAX_LINE_BYTES} bytes")
    values = [number(name, float) for name in header.numbers]
    step = whole("step")
    micro_step = whole("micro_step") if "micro_step" in at else -1
    key = RowKey(whole("vpp_stage"), text(header.name), micro_step, text("scope"))
    order = whole("order")
    layout = keys.layout_id((text("shape"), text("dtype")))
    return step, keys.key_id(key), order, layout, values, text(HISTOGRAM)
