"""Reads single row groups and columns of a table in Parquet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainsentry.exporters.csv.format import TableFile
from trainsentry.exporters.csv.header import Header, parse_header
from trainsentry.exporters.csv.pieces import allowed_bytes
from trainsentry.exporters.csv.table_rows import Ids, RowKey, RowKeys, TableRows
from trainsentry.exporters.files.foreign_files import InputError, Report, open_file

ROW_BYTES = 150
"""Bytes of a row as CSV, to compare the cost of reading it: a name, seven numbers, a shape."""

PARQUET_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, MemoryError, OSError)
"""Exceptions that pyarrow raises for a damaged file; its own errors derive from these."""


def _opened(path: Path, stream: Any) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError(f"{path}: is Parquet; allowed: pip install 'trainsentry[parquet]'") from None
    try:
        found = pq.ParquetFile(stream)
    except PARQUET_ERRORS as error:
        raise InputError(f"{path}: {str(error).partition(chr(10))[0]}") from None
    if found.metadata.num_rows * found.metadata.num_columns * 8 > allowed_bytes(path):
        raise InputError(f"{path}: claims {found.metadata.num_rows} rows, too many for its size")
    return found


def shape_of_parquet(file: TableFile, report: Report) -> tuple[Header, int] | None:
    """Return a table's header and the bytes of its first step as CSV; None where the header cannot be used.

    Raises:
        InputError: when it is not Parquet, or claims more than its size can hold.
        OSError: when it cannot be read.

    """
    with open_file(file.path) as stream:
        stored = _opened(file.path, stream)
        wrong, header = parse_header(list(stored.schema_arrow.names), file.table, foreign=file.foreign)
        for message in wrong:
            report(file.path, 1, message)
        if header is None or not stored.num_row_groups:
            return None
        steps = _columns(file.path, stored, 0, ["step"])["step"]
        return header, ROW_BYTES * max(int((steps == steps[:1]).sum()), 1)


def groups_of(file: TableFile, steps: range) -> list[tuple[int, int]]:
    """Return the row groups that may hold some of the steps, each with its cost in bytes of CSV.

    Raises:
        InputError: when it is not Parquet, or claims more than its size can hold.
        OSError: when it cannot be read.

    """
    with open_file(file.path) as stream:
        metadata = _opened(file.path, stream).metadata
    found = []
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group)
        columns = [rows.column(i) for i in range(rows.num_columns)]
        known = next((c.statistics for c in columns if c.path_in_schema == "step"), None)
        if known is not None and known.has_min_max:
            low, high = known.min, known.max
            if isinstance(low, int) and isinstance(high, int) and (high < steps.start or low >= steps.stop):
                continue
        found.append((group, ROW_BYTES * rows.num_rows))
    return found


def group_rows(
    file: TableFile, group: int, keys: RowKeys, numbers: Sequence[str], name: str | None
) -> tuple[TableRows, Ids]:
    """Return the rows of a row group, those of one `name` if it is given, with these columns, and the rows' steps.

    Raises:
        InputError: when it cannot be read.
        OSError: when it cannot be read.

    """
    with open_file(file.path) as stream:
        stored = _opened(file.path, stream)
        header = parse_header(list(stored.schema_arrow.names), file.table, foreign=file.foreign)[1]
        if header is None:
            raise InputError(f"{file.path}: the header cannot be used")
        numbers = [c for c in numbers if c in header.numbers]
        wanted = [c for c in ("vpp_stage", "step", "micro_step", "shape", "dtype", *numbers) if c in header.columns]
        found = _columns(file.path, stored, group, [header.name, *wanted], name, header.name)
    count = len(found["step"])
    zeros = np.zeros(count, np.int64)
    names, codes = np.unique(found[header.name].astype(str), return_inverse=True)
    stages, micro_steps = found.get("vpp_stage", zeros), found.get("micro_step", zeros - 1)
    layouts, kinds = found.get("shape", zeros.astype(str)).astype(str), found.get("dtype", zeros.astype(str))
    texts, layout_codes = np.unique(layouts, return_inverse=True)
    ids = np.asarray([keys.layout_id((text, str(kinds[0]))) for text in texts.tolist()], np.int64)
    sets, inverse = np.unique(np.stack([codes, stages, micro_steps]), axis=1, return_inverse=True)
    key_ids = [keys.key_id(RowKey(int(s), str(names[n]), int(m))) for n, s, m in sets.T.tolist()]
    values = np.stack([np.asarray(found[c], np.float64) for c in numbers], axis=1) if numbers else np.zeros((count, 0))
    rows = TableRows(
        0,
        file.restart,
        tuple(numbers),
        np.asarray(key_ids, np.int64)[inverse.reshape(-1)],
        zeros,
        ids[layout_codes],
        values,
    )
    return rows, found["step"].astype(np.int64)


def _columns(
    path: Path, stored: Any, group: int, columns: list[str], name: str | None = None, where: str = "name"
) -> dict[str, Any]:
    """Return columns of a row group as arrays; with `name`, the rows whose column `where` has it.

    Raises:
        InputError: when they cannot be read.

    """
    import pyarrow.compute as pc

    try:
        table = stored.read_row_group(group, columns=columns)
        if name is not None:
            table = table.filter(pc.equal(table[where].cast("string"), name))
        return {column: table[column].to_numpy() for column in columns}
    except PARQUET_ERRORS as error:
        raise InputError(f"{path}: {str(error).partition(chr(10))[0]}") from None
