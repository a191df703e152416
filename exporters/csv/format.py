"""The CSV tables: file names, columns, and how a value is written."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainsentry.collectors.series import (
    COMMUNICATION_INPUT,
    COMMUNICATION_OUTPUT,
    GRADIENT_UNREDUCED,
    UPDATE,
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
"""Columns at the end of some tables."""

_FILE: Final = re.compile(
    r"(?P<table>.+)_(?P<first>\d{1,16})-(?P<last>\d{1,16})(?:\.r(?P<restart>\d{1,9}))?\.(?:csv|csv\.zst|parquet)",
    re.ASCII | re.DOTALL,
)

MAX_DIMENSIONS: Final = 64
"""Dimensions of a tensor: what NumPy and torch hold."""


@dataclass(frozen=True)
class TableFile:
    """A CSV file: its table (a quantity or `scalars`), its steps, and which start of the run wrote it.

    A `foreign` one is msprobe's.
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
    """Return what a file's name says, or None when it is not a table of ours.

    >>> parse_file_name(Path("gradient_200-999.r1.csv")).restart
    1
    """
    match = _FILE.fullmatch(path.name)
    if match is None:
        return None
    first, last, restart = int(match["first"]), int(match["last"]), int(match["restart"] or 0)
    return TableFile(path, match["table"], first, last, restart)


def table_paths(directory: Path) -> list[Path]:
    """Return the tables in a directory, by name; those that are being made are none."""
    if not directory.is_dir():
        return []
    names = sorted(path for path in directory.iterdir() if path.suffix in {".csv", ".zst", ".parquet"})
    return [path for path in names if parse_file_name(path) and not path.name.startswith(".") and path.is_file()]


def table_of(series: Series) -> str:
    """Return the table that a series belongs to."""
    return SCALARS if series.scalar else re.sub(r"[^A-Za-z0-9_.]", "_", series.quantity)


def columns_of(table: str, statistics: tuple[str, ...]) -> tuple[str, ...]:
    """Return a table's columns.

    >>> columns_of("update", ("norm",))
    ('vpp_stage', 'name', 'step', 'micro_step', 'order', 'norm', 'ratio', 'shape', 'dtype')
    """
    if table == SCALARS:
        return SCALAR_COLUMNS
    extra = ("ratio",) if table == UPDATE else ()
    return (*FIRST_COLUMNS, *statistics, *extra, *LAST_COLUMNS, *EXTRA_COLUMNS.get(table, ()))


def parse_shape(shape: str) -> tuple[int, ...]:
    """Return the sizes that a row's text of a shape says; what is no number, or no size of a tensor, is left out.

    >>> sizes_of("[2, 3]"), sizes_of("[]"), sizes_of("[" + "9" * 5000 + "]")
    ((2, 3), (), ())
    """
    return tuple(int(n) for n in _SIZE.findall(shape)[:MAX_DIMENSIONS])


_SIZE: Final = re.compile(r"(?<!\d)\d{1,18}(?!\d)", re.ASCII)


def elements_of(sizes: tuple[int, ...]) -> int:
    """Return how many elements a tensor of these sizes has: at most what 64 bits count.

    >>> elements_of((2, 3)), elements_of((10**18, 10**18))
    (6, 9223372036854775807)
    """
    return min(math.prod(sizes), (1 << 63) - 1)


def quote(text: str) -> str:
    """Return a field, quoted where it needs to be (RFC 4180)."""
    if any(c in text for c in ',"\n\r'):
        return '"' + text.replace('"', '""') + '"'
    return text


def format_value(value: float, *, count: bool = False) -> str:
    """Return a number as text that reads back exactly; counts without a decimal point."""
    return str(int(value)) if count and not math.isnan(value) else repr(value)


def bytes_of(layout: Layout) -> int:
    """Return the bytes of a tensor.

    >>> bytes_of(Layout((2, 3), "bfloat16", 6))
    12
    """
    digits = re.match(r"[a-z]+(\d+)", layout.dtype)
    return layout.numel * (int(digits[1]) // 8 if digits else 1)
