"""Writes the levels of a rank's tables beside them, and goes on with them after a restart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import COMMUNICATION_CALL, VALUE_NAMES, Series, SeriesTable
from trainsentry.collectors.statistics import COUNTS, STATISTICS, VALUE
from trainsentry.exporters.csv.format import (
    SCALAR_COLUMNS,
    SCALARS,
    TableFile,
    columns_of,
    parse_file_name,
    quote,
    row_texts,
    table_of,
    table_paths,
)
from trainsentry.exporters.csv.levels import ENDS_BUCKET, WIDTHS, LeveledTable, LevelRows, level_folder, tail_of
from trainsentry.exporters.csv.table_rows import RowKey
from trainsentry.exporters.files.json_files import cut_torn_line
from trainsentry.exporters.files.whole_writes import append_whole

NO_TABLE: Final = -1
"""The place of a table for series that have no levels."""

SCALAR_LEVEL_COLUMNS: Final = (*SCALAR_COLUMNS[:-1], "order", SCALAR_COLUMNS[-1])


class LevelWriter:
    """Keeps the levels of the tables in `directory`; an error leaves the tables themselves as they are."""

    def __init__(
        self,
        directory: Path,
        table: SeriesTable,
        statistics: tuple[str, ...],
        *,
        steps_per_file: int = 1000,
        start_step: int = 0,
        restart: int = 0,
    ) -> None:
        self.directory = directory
        self.table = table
        self.statistics = statistics
        self.steps_per_file = steps_per_file
        self.start_step = start_step
        self.restart = restart
        self._columns = [STATISTICS.index(name) for name in statistics]
        self._tables: dict[str, LeveledTable | None] = {}
        self._names: list[str] = []
        self._places = np.empty((0, 3), np.int32)  # of each series: its table in `_names`, its slot, its newest layout
        self._begun_files: set[Path] = set()
        self._earlier = [file for path in table_paths(directory) if (file := parse_file_name(path)) is not None]

    def write(self, record: StepRecord) -> None:
        """Take in a record whose rows are in the tables.

        Raises:
            OSError: when a file cannot be written.

        """
        self._place_new_series()
        if not len(record):
            return
        tables, slots, known = self._places[record.ids].T
        for row in np.flatnonzero(known != record.layouts).tolist():
            self._renew_tail(int(record.ids[row]), int(record.layouts[row]))
        for place in np.flatnonzero(np.bincount(tables - NO_TABLE)[1:]).tolist():
            name = self._names[place]
            table = self._tables[name]
            if table is not None:
                rows = np.flatnonzero(tables == place)
                values = record.values[rows][:, self._columns_in(name)]
                table.take(LevelRows(record.step, slots[rows].astype(np.intp), values))

    def close(self) -> None:
        """Write the buckets that are open.

        Raises:
            OSError: when a file cannot be written.

        """
        for table in self._tables.values():
            if table is not None:
                table.finish()

    def _place_new_series(self) -> None:
        """Give each series that is new its table and its place there."""
        first, end = len(self._places), len(self.table.series)
        if first < end:
            new = np.array([self._place_of(series) for series in self.table.series[first:end]], np.int32)
            self._places = np.concatenate([self._places, new])

    def _place_of(self, series: Series) -> tuple[int, int, int]:
        """Return the table of a series, its slot there, and a layout that no row has."""
        if series.quantity == COMMUNICATION_CALL:
            return NO_TABLE, 0, -1
        name = table_of(series)
        if name not in self._tables:
            self._tables[name] = self._begun(name)
            self._names.append(name)
        table, slot = self._tables[name], 0
        if table is not None:
            slot = table.slot(RowKey(0 if series.scalar else series.vpp_stage, series.name, series.micro_step))
            if table.is_too_wide:
                self._tables[name] = None
        return self._names.index(name), slot, -1

    def _columns_in(self, name: str) -> list[int]:
        """Return the columns of a record that a table has."""
        return [VALUE] if name == SCALARS else [*self._columns, *[VALUE] * (name in VALUE_NAMES)]

    def _begun(self, name: str) -> LeveledTable | None:
        """Return a table with the buckets that an earlier start left open; None if that is too much to read."""
        columns = ("value",) if name == SCALARS else (*self.statistics, *filter(None, [VALUE_NAMES.get(name)]))
        table = LeveledTable(name, columns, self._append)
        files = [file for file in self._earlier if file.table == name]
        if files:
            from trainsentry.exporters.csv.level_catch_up import catch_up  # pandas, which a fresh start does not need

            if not catch_up(table, files, self.start_step, self.restart):
                return None
        return table

    def _append(self, level: int, table: LeveledTable, bucket: Sequence[LevelRows]) -> None:
        """Write a bucket's rows to their files."""
        counts = tuple(name in COUNTS for name in table.columns)
        keys = list(table.keys)
        for place, rows in enumerate(bucket, ENDS_BUCKET + 1 - len(bucket)):
            lines = []
            for slot, numbers in zip(rows.slots.tolist(), row_texts(rows.values, counts), strict=True):
                key = keys[slot]
                lead = quote(key.name) if table.name == SCALARS else f"{key.vpp_stage},{quote(key.name)}"
                lines.append(f"{lead},{rows.step},{key.micro_step},{place},{numbers}{table.tails[slot]}\n")
            self._append_to_file(level, table.name, rows.step, "".join(lines).encode())

    def _append_to_file(self, level: int, name: str, step: int, data: bytes) -> None:
        """Append lines to the file of a step; a file has about as many rows as one of the table, and is not kept open.

        Raises:
            OSError: when it cannot be written; then it holds nothing of the lines.

        """
        width = self.steps_per_file * WIDTHS[level] // 2
        block = step // width * width
        folder = level_folder(self.directory, level)
        path = folder / TableFile(folder, name, block, block + width - 1, self.restart).file_name
        if path not in self._begun_files:
            folder.mkdir(parents=True, exist_ok=True)
            cut_torn_line(path)
            self._begun_files.add(path)
        with path.open("ab", buffering=0) as file:
            if file.tell() == 0:
                columns = columns_of(name, self.statistics) if name != SCALARS else SCALAR_LEVEL_COLUMNS
                append_whole(file, (",".join(columns) + "\n").encode())
            append_whole(file, data)

    def _renew_tail(self, series_id: int, layout_id: int) -> None:
        """Note the layout of a series, which is the text after its rows' numbers: shape and dtype."""
        place, slot, _ = self._places[series_id].tolist()
        self._places[series_id, 2] = layout_id
        if place == NO_TABLE or self._names[place] == SCALARS:
            return
        table, layout = self._tables[self._names[place]], self.table.layouts[layout_id]
        if table is not None:
            table.tails[slot] = tail_of(table.name, str(list(layout.shape)), layout.dtype)
