"""Reads a table in Parquet as frames like those of CSV, within the same limits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from trainsentry.exporters.csv.format import TableFile
from trainsentry.exporters.csv.header import INTEGER_COLUMNS, MAX_COLUMNS, Header, parse_header
from trainsentry.exporters.csv.pieces import allowed_bytes
from trainsentry.exporters.files.foreign_files import InputError, open_file

ROWS: Final = 1 << 16
"""Rows read at a time, about as many as a piece of CSV has."""

_WRONG: Final = (ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, MemoryError, OSError)
"""Exceptions that pyarrow raises for a damaged file; its own errors derive from these."""


def parquet_frames(file: TableFile, wrong: list[str]) -> Iterator[tuple[Header, pd.DataFrame]]:
    """Yield the rows of a table in batches, with texts as categories; `wrong` gets the header's problems.

    Raises:
        InputError: when it is not Parquet, a column has the wrong type, or it would become too large.
        OSError: when it cannot be read.

    """
    path = file.path
    with open_file(path) as stream:
        stored = _opened(path, stream)
        names = list(stored.schema_arrow.names)
        messages, header = parse_header(names[: MAX_COLUMNS + 1], file.table, foreign=file.foreign)
        wrong.extend(messages)
        if header is None:
            return
        if stored.metadata.num_rows * len(names) * 8 > allowed_bytes(path):
            raise InputError(f"{path}: claims {stored.metadata.num_rows} rows, too many for its size")
        try:
            stored = _opened(path, stream, read_dictionary=list(header.texts))
            for batch in stored.iter_batches(ROWS):
                yield header, _as_written(batch.to_pandas(), header)
        except _WRONG as error:
            raise InputError(f"{path}: {_first_line(error)}") from None


def _opened(path: Path, stream: Any, **options: Any) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError(f"{path}: is Parquet; allowed: pip install 'trainsentry[parquet]'") from None
    try:
        stream.seek(0)
        return pq.ParquetFile(stream, **options)
    except _WRONG as error:
        raise InputError(f"{path}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _as_written(frame: pd.DataFrame, header: Header) -> pd.DataFrame:
    """Convert a frame's columns to the types of a CSV table.

    Raises:
        ValueError: when a value cannot be converted.

    """
    made: pd.DataFrame = pd.DataFrame(index=frame.index)
    for name in header.columns:
        column = frame[name]
        if name in header.numbers:
            made[name] = column.to_numpy(np.float64)
        elif name in INTEGER_COLUMNS:
            if not pd.api.types.is_integer_dtype(column.dtype):
                raise ValueError(f"{name}: holds {column.dtype}, expected whole numbers")
            made[name] = column.to_numpy(np.int64)
        elif isinstance(column.dtype, pd.CategoricalDtype) and not column.hasnans:
            made[name] = column.cat.rename_categories([str(text) for text in column.cat.categories])
        else:
            made[name] = column.map(str).astype("category")
    return made


def row_count(path: Path) -> int:
    """Return the number of rows that a table claims; 0 when it cannot be read."""
    try:
        with open_file(path) as stream:
            return int(_opened(path, stream).metadata.num_rows)
    except (InputError, OSError):
        return 0
