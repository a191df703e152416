"""The format of the CSV tables: file names, columns, and the text of a value."""

import math
import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson

from trainsentry.collectors.histogram import HISTOGRAM
from trainsentry.collectors.series import (
    COMMUNICATION_INPUT,
    COMMUNICATION_OUTPUT,
    GRADIENT_UNREDUCED,
    VALUE_NAMES,
    Layout,
    Series,
)

SCALARS: Final = "scalars"
FIRST_COLUMNS: Final = ("vpp_stage", "name", "step", "micro_step", "order")
LAST_COLUMNS: Final = ("shape", "dtype")
SCALAR_COLUMNS: Final = ("name", "step", "micro_step", "value")

EXTRA_COLUMNS: Final = {
    GRADIENT_UNREDUCED: ("holds",),
    COMMUNICATION_INPUT: ("op", "group", "sequence", "bytes", "seconds"),
    COMMUNICATION_OUTPUT: ("op", "group", "sequence", "bytes", "seconds"),
}
"""Columns that some tables have after the others."""

_FILE: Final = re.compile(
    r"(?P<table>.+)_(?P<first>\d{1,16})-(?P<last>\d{1,16})(?:\.r(?P<restart>\d{1,9}))?\.(?:csv|csv\.zst|parquet)",
    re.ASCII | re.DOTALL,
)

MAX_DIMENSIONS: Final = 64
"""Dimensions of a tensor, the limit of NumPy and torch."""


@dataclass(frozen=True)
class TableFile:
    """A CSV file: its table (a quantity or `scalars`), its steps, and the number of the start that wrote it.

    `foreign` files are msprobe's.
    """

    path: Path
    table: str
    first: int
    last: int
    restart: int
    foreign: bool = False

    @property
    def file_name(self) -> str:
        """The name on disk."""
        suffix = f".r{self.restart}" if self.restart else ""
        return f"{self.table}_{self.first}-{self.last}{suffix}.csv"


def parse_file_name(path: Path) -> TableFile | None:
    """Parse a file's name; return None when it is not a table of ours.

    >>> parse_file_name(Path("gradient_200-999.r1.csv")).restart
    1
    """
    match = _FILE.fullmatch(path.name)
    if match is None:
        return None
    first, last, restart = int(match["first"]), int(match["last"]), int(match["restart"] or 0)
    return TableFile(path, match["table"], first, last, restart)


def table_paths(directory: Path) -> list[Path]:
    """Return the tables in a directory, sorted by name, without temporary files."""
    if not directory.is_dir():
        return []
    names = sorted(path for path in directory.iterdir() if path.suffix in {".csv", ".zst", ".parquet"})
    return [path for path in names if parse_file_name(path) and not path.name.startswith(".") and path.is_file()]


def table_of(series: Series) -> str:
    """Return the table that a series belongs to."""
    return SCALARS if series.scalar else re.sub(r"[^A-Za-z0-9_.]", "_", series.quantity)


def columns_of(table: str, statistics: tuple[str, ...], *, histograms: bool = False) -> tuple[str, ...]:
    """Return a table's columns.

    >>> columns_of("update", ("norm",))
    ('vpp_stage', 'name', 'step', 'micro_step', 'order', 'norm', 'ratio', 'shape', 'dtype')
    """
    if table == SCALARS:
        return SCALAR_COLUMNS
    extra = (VALUE_NAMES[table],) if table in VALUE_NAMES else ()
    counted = (HISTOGRAM,) if histograms else ()
    return (*FIRST_COLUMNS, *statistics, *extra, *counted, *LAST_COLUMNS, *EXTRA_COLUMNS.get(table, ()))


def parse_shape(shape: str) -> tuple[int, ...]:
    """Parse the text of a shape; anything but a size of a tensor is skipped.

    >>> parse_shape("[2, 3]"), parse_shape("[]"), parse_shape("[" + "9" * 5000 + "]")
    ((2, 3), (), ())
    """
    return tuple(int(n) for n in _SIZE.findall(shape)[:MAX_DIMENSIONS])


_SIZE: Final = re.compile(r"(?<!\d)\d{1,18}(?!\d)", re.ASCII)


def elements_of(sizes: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor of these sizes, clipped to 2^63 - 1.

    >>> elements_of((2, 3)), elements_of((10**18, 10**18))
    (6, 9223372036854775807)
    """
    return min(math.prod(sizes), (1 << 63) - 1)


def quote(text: str) -> str:
    """Return a field, quoted where necessary (RFC 4180)."""
    if any(c in text for c in ',"\n\r'):
        return '"' + text.replace('"', '""') + '"'
    return text


def format_value(value: float, *, count: bool = False) -> str:
    """Return a number as text that reads back exactly; counts have no decimal point."""
    return str(int(value)) if count and not math.isnan(value) else repr(value)


def row_texts(values: npt.NDArray[np.float64], counts: tuple[bool, ...]) -> list[str]:
    """Return each row of `values`, shape (rows, columns), as text with commas between the numbers.

    A number reads back to the same float64; the columns of `counts` are whole numbers, without a decimal point.

    >>> row_texts(np.array([[0.1, 2.0], [np.nan, 0.0]]), (False, True))
    ['0.1,2', 'nan,0']
    """
    if not len(values) or not counts:
        return [""] * len(values)
    finite = np.isfinite(values)
    all_finite = bool(finite.all())
    known = values if all_finite else np.where(finite, values, 0.0)
    groups = [(count, [i for i, _ in items]) for count, items in groupby(enumerate(counts), key=lambda item: item[1])]
    parts = [_texts(known[:, columns].astype(np.int64) if count else known[:, columns]) for count, columns in groups]
    texts = parts[0] if len(parts) == 1 else [",".join(row) for row in zip(*parts, strict=True)]
    if not all_finite:
        for row in np.flatnonzero(~finite.all(axis=1)).tolist():
            numbers = zip(values[row].tolist(), counts, strict=True)
            texts[row] = ",".join(format_value(value, count=count and np.isfinite(value)) for value, count in numbers)
    return texts


def _texts(values: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> list[str]:
    """Return the rows of a matrix of finite numbers as text; orjson writes the shortest text that reads back."""
    return orjson.dumps(np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY)[2:-2].decode().split("],[")


def bytes_of(layout: Layout) -> int:
    """Return the bytes of a tensor.

    >>> bytes_of(Layout((2, 3), "bfloat16", 6))
    12
    """
    digits = re.match(r"[a-z]+(\d+)", layout.dtype)
    return layout.numel * (int(digits[1]) // 8 if digits else 1)
