"""Writes step records as CSV: one file per quantity and block of steps, whole after a kill."""

import math
from pathlib import Path
from typing import BinaryIO

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import COMMUNICATION_CALL, GRADIENT_UNREDUCED, UPDATE, Series, SeriesTable
from trainsentry.collectors.statistics import COUNTS, STATISTICS, VALUE
from trainsentry.exporters.csv_format import (
    LAST,
    SCALARS,
    TableFile,
    bytes_of,
    columns_of,
    format_value,
    parse_file_name,
    quote,
    table_of,
    table_paths,
)
from trainsentry.exporters.finished_blocks import begin_compacting
from trainsentry.exporters.json_files import cut_torn_line
from trainsentry.exporters.number_text import row_texts


class CsvWriter:
    """Appends each record's rows in one write per file, unbuffered, so that a kill loses no written step."""

    def __init__(
        self,
        directory: Path,
        table: SeriesTable,
        statistics: tuple[str, ...],
        *,
        steps_per_file: int = 1000,
        start_step: int = 0,
        restart: int = 0,
        finished_blocks: str = "csv",
    ) -> None:
        self.directory = directory
        self.table = table
        self.statistics = statistics
        self.steps_per_file = steps_per_file
        self.start_step = start_step
        self.restart = restart
        self.finished_blocks = finished_blocks
        self._columns = [STATISTICS.index(name) for name in statistics]
        self._counts = tuple(name in COUNTS for name in statistics)
        self._files: dict[str, tuple[TableFile, BinaryIO]] = {}
        self._leads: dict[int, tuple[str, str, int]] = {}
        self._tails: dict[int, str] = {}
        self._call_ids: set[int] = set()
        self._looked_at = 0
        self._finished: list[Path] = []

    def write(self, record: StepRecord) -> None:
        """Append the record's rows to the files of their quantities."""
        texts: dict[str, list[str]] = {}
        numbers = row_texts(record.values[:, self._columns], self._counts)
        values = record.values[:, VALUE].tolist()
        middle = f",{record.step},"
        calls = self._calls(record)
        rows = zip(record.ids.tolist(), record.layouts.tolist(), numbers, values, strict=True)
        for order, (series_id, layout, number, value) in enumerate(rows, record.first_order):
            table, lead, micro_step = self._lead(series_id)
            if table == SCALARS:
                line = f"{lead}{middle}{micro_step},{format_value(value)}\n"
            elif table == UPDATE:
                line = f"{lead}{middle}{micro_step},{order},{number},{format_value(value)}{self._tail(layout)}\n"
            elif table == COMMUNICATION_CALL:
                continue
            else:
                last = self._last(table, self.table.series[series_id], layout, calls) if table in LAST else ""
                line = f"{lead}{middle}{micro_step},{order},{number}{self._tail(layout)}{last}\n"
            texts.setdefault(table, []).append(line)
        for table, lines in texts.items():
            self._file(table, record.step).write("".join(lines).encode())
        if self._finished and self.finished_blocks != "csv":
            begin_compacting(self._finished, self.finished_blocks)
        self._finished = []

    def _calls(self, record: StepRecord) -> dict[str, tuple[float, float]]:
        """Return order and seconds of the record's collective calls, by name."""
        new = enumerate(self.table.series[self._looked_at :], self._looked_at)
        self._call_ids.update(i for i, series in new if series.quantity == COMMUNICATION_CALL)
        self._looked_at = len(self.table.series)
        if not self._call_ids:
            return {}
        rows = [(row, i) for row, i in enumerate(record.ids.tolist()) if i in self._call_ids]
        return {self.table.series[i].name: tuple(record.values[row, :2].tolist()) for row, i in rows}

    def _last(self, table: str, series: Series, layout: int, calls: dict[str, tuple[float, float]]) -> str:
        """Return the text of the columns at the end of a table."""
        if table == GRADIENT_UNREDUCED:
            return f",{series.index}"
        op, group, call = series.index.split("|")
        sequence, seconds = calls.get(call, (math.nan, math.nan))
        ended = "" if math.isnan(seconds) else format_value(seconds)
        number = "" if math.isnan(sequence) else int(sequence)
        return f",{op},{quote(group)},{number},{bytes_of(self.table.layouts[layout])},{ended}"

    def begin_again(self, step: int) -> None:
        """Go on from an earlier step in new files beside the old."""
        self.close()
        self.start_step = step
        self.restart = max(next_restart(self.directory), self.restart + 1)

    def close(self) -> None:
        """Close every file."""
        for _, file in self._files.values():
            file.close()
        self._files.clear()

    def _lead(self, series_id: int) -> tuple[str, str, int]:
        """Return a series' table, its text before the step, which is the same at every step, and its micro-step."""
        known = self._leads.get(series_id)
        if known is None:
            series = self.table.series[series_id]
            name = quote(series.name)
            known = self._leads[series_id] = (
                table_of(series),
                name if series.scalar else f"{series.vpp_stage},{name}",
                series.micro_step,
            )
        return known

    def _tail(self, layout_id: int) -> str:
        """Return the text behind the numbers."""
        known = self._tails.get(layout_id)
        if known is None:
            layout = self.table.layouts[layout_id]
            known = self._tails[layout_id] = f",{quote(str(list(layout.shape)))},{layout.dtype}"
        return known

    def _file(self, table: str, step: int) -> BinaryIO:
        block = step // self.steps_per_file * self.steps_per_file
        last = block + self.steps_per_file - 1
        known = self._files.get(table)
        if known is not None and known[0].last == last:
            return known[1]
        if known is not None:
            known[1].close()
            self._finished.append(known[0].path)
        first = max(block, self.start_step)
        name = TableFile(Path(), table, first, last, self.restart).file_name
        path = self.directory / name
        self.directory.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        file = path.open("ab", buffering=0)
        if file.tell() == 0:
            file.write((",".join(columns_of(table, self.statistics)) + "\n").encode())
        self._files[table] = (TableFile(path, table, first, last, self.restart), file)
        return file


def next_restart(directory: Path) -> int:
    """Return the number of this start of a run: one more than any that has left tables in `directory`."""
    found = [parse_file_name(path) for path in table_paths(directory)]
    return max((f.restart + 1 for f in found if f is not None), default=0)
