"""Writes the levels of a rank's tables beside them, and goes on with them after a restart."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.record import StepRecord, as_index
from trainsentry.collectors.series import COMMUNICATION_CALL, VALUE_NAMES, SeriesTable
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

MOST_GROUPS: Final = 64
"""Sets of series whose places are kept: micro-steps and sampling make a few; more would be a leak."""

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
        self._groups: dict[bytes, list[_Group]] = {}
        self._begun_files: set[Path] = set()
        self._earlier = [file for path in table_paths(directory) if (file := parse_file_name(path)) is not None]

    def write(self, record: StepRecord) -> None:
        """Take in a record whose rows are in the tables.

        Raises:
            OSError: when a file cannot be written.

        """
        ids = record.ids.tobytes()
        if ids not in self._groups:
            if len(self._groups) >= MOST_GROUPS:
                self._groups.clear()
            self._groups[ids] = self._grouped(record)
        for group in self._groups[ids]:
            table = self._tables[group.table]
            if table is None:
                continue
            layouts = record.layouts[group.rows]
            if not np.array_equal(layouts, group.layouts):
                group.layouts = layouts
                for slot, layout in zip(group.slots.tolist(), layouts.tolist(), strict=True):
                    table.tails[slot] = self._tail(group.table, layout)
            table.take(LevelRows(record.step, group.slots, record.values[group.rows][:, group.columns].copy()))

    def close(self) -> None:
        """Write the buckets that are open.

        Raises:
            OSError: when a file cannot be written.

        """
        for table in self._tables.values():
            if table is not None:
                table.finish()

    def _grouped(self, record: StepRecord) -> list["_Group"]:
        """Return the rows of a record by table."""
        found: dict[str, tuple[list[int], list[int]]] = {}
        for row, series_id in enumerate(record.ids.tolist()):
            series = self.table.series[series_id]
            name = table_of(series)
            if series.quantity == COMMUNICATION_CALL:
                continue
            if name not in self._tables:
                self._tables[name] = self._begun(name)
            table = self._tables[name]
            if table is not None:
                key = RowKey(0 if series.scalar else series.vpp_stage, series.name, series.micro_step)
                rows, slots = found.setdefault(name, ([], []))
                rows.append(row)
                slots.append(table.slot(key))
                if table.is_too_wide:
                    self._tables[name] = None
        nothing = np.empty(0, np.int32)
        return [
            _Group(name, as_index(np.asarray(rows, np.int32)), self._columns_in(name), np.asarray(slots), nothing)
            for name, (rows, slots) in found.items()
        ]

    def _columns_in(self, name: str) -> Any:
        """Return the columns of a record that a table has, as an index."""
        columns = [VALUE] if name == SCALARS else [*self._columns, *[VALUE] * (name in VALUE_NAMES)]
        return as_index(np.asarray(columns, np.int32))

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

    def _tail(self, name: str, layout_id: int) -> str:
        """Return the text after a row's numbers: shape and dtype; what else a table has stays empty."""
        if name == SCALARS:
            return ""
        layout = self.table.layouts[layout_id]
        return tail_of(name, str(list(layout.shape)), layout.dtype)


@dataclass
class _Group:
    """Which rows and columns of a record are in one table, the rows' places there, and the layouts they had last."""

    table: str
    rows: Any
    columns: Any
    slots: npt.NDArray[np.intp]
    layouts: npt.NDArray[np.int32]
