"""Yields the rows of a table for a report: all of them, or of a long history the extremes that its levels hold."""

from collections.abc import Iterator, Sequence
from typing import Final

from trainsentry.exporters.csv.format import TableFile
from trainsentry.exporters.csv.level_files import history_parts, levels_of, rows_by_step
from trainsentry.exporters.csv.reader import read_steps
from trainsentry.exporters.csv.table_parts import parts_of
from trainsentry.exporters.csv.table_rows import RowKeys, TableRows
from trainsentry.exporters.files.foreign_files import Report

ALL_BYTES: Final = 1 << 26
"""Bytes of a table that are parsed at most where it has levels: two or three seconds, and 100 MB of memory."""

ALL_STEPS: Final = range(1 << 53)


def history_rows(
    files: Sequence[TableFile], marked: Sequence[int], keys: RowKeys, report: Report
) -> Iterator[tuple[TableRows, bool]]:
    """Yield the rows of a table by ascending step, and whether they are a bucket's extremes instead of one step's rows.

    A table of more than ALL_BYTES is shown by the finest level that is smaller, with the newest steps and the steps
    around `marked` as they were recorded. One without levels is read whole.
    """
    levels = levels_of(files)
    found = history_parts(files, levels, ALL_STEPS, ALL_BYTES, report) if any(levels) else None
    if found is None or found.width == 1:
        yield from ((rows, False) for rows in read_steps(files, keys, report))
        return
    around = [part for step in marked for part in parts_of(files, range(max(step - 2, 0), step + 3), report)]
    yield from rows_by_step([*found.parts, *around], keys, (), report)
