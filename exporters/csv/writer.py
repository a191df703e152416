"""Writes step records as CSV: one file per quantity and block of steps, readable after a kill."""

import contextlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import COMMUNICATION_CALL, GRADIENT_UNREDUCED, VALUE_NAMES, Series, SeriesTable
from trainsentry.collectors.statistics import COUNTS, STATISTICS, VALUE
from trainsentry.exporters.csv.finished_blocks import start_compacting
from trainsentry.exporters.csv.format import (
    EXTRA_COLUMNS,
    SCALARS,
    TableFile,
    bytes_of,
    columns_of,
    format_value,
    parse_file_name,
    quote,
    row_texts,
    table_of,
    table_paths,
)
from trainsentry.exporters.csv.level_writer import LevelWriter
from trainsentry.exporters.exporter import Lost, nothing_lost
from trainsentry.exporters.files.json_files import cut_torn_line
from trainsentry.exporters.files.whole_writes import LOOK_SECONDS, append_whole, cut_back, is_removed
from trainsentry.exporters.short_text import first_of


@dataclass
class _OpenTable:
    """A table that is being written, and its newest step."""

    table: TableFile
    file: BinaryIO
    newest: int


class CsvWriter:
    """Appends each record's rows in one unbuffered write per file, so that a kill loses no written step.

    A record goes to all its tables or, if one cannot be written, to none, so it can be retried. A file that somebody
    removes is created again, and `lost` gets the steps that went with it.
    """

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
        histograms: bool = False,
        levels: bool = False,
        lost: Lost = nothing_lost,
    ) -> None:
        self.directory = directory
        self.table = table
        self.statistics = statistics
        self.steps_per_file = steps_per_file
        self.start_step = start_step
        self.restart = restart
        self.finished_blocks = finished_blocks
        self.histograms = histograms
        self._lost = lost
        self._checked_at = 0.0
        self._columns = [STATISTICS.index(name) for name in statistics]
        self._counts = tuple(name in COUNTS for name in statistics)
        self._files: dict[str, _OpenTable] = {}
        self._leads: dict[int, tuple[str, str, int]] = {}
        self._tails: dict[int, str] = {}
        self._call_ids: set[int] = set()
        self._looked_at = 0
        self._finished: list[Path] = []
        self._levels = self._new_levels() if levels else None
        self._has_levels = levels

    def write(self, record: StepRecord) -> None:
        """Append the record's rows to the files of their quantities.

        Raises:
            OSError: when a file cannot be written; then no file holds any row of the record.

        """
        self._append(record.step, self._texts(record))
        if self._has_levels and self._levels is None and self._finished:  # once a block, after trouble
            self._levels = self._new_levels()
        if self._finished and self.finished_blocks != "csv":
            start_compacting(self._finished, self.finished_blocks)
        self._finished = []
        if self._levels is not None:
            try:
                self._levels.write(record)
            except Exception:  # noqa: BLE001 - the rows are written; a history without levels only opens more slowly
                self._levels = None

    def _new_levels(self) -> LevelWriter:
        return LevelWriter(
            self.directory,
            self.table,
            self.statistics,
            steps_per_file=self.steps_per_file,
            start_step=self.start_step,
            restart=self.restart,
        )

    def _texts(self, record: StepRecord) -> dict[str, list[str]]:
        """Return the record's lines by table."""
        texts: dict[str, list[str]] = {}
        numbers = row_texts(record.values[:, self._columns], self._counts)
        values = record.values[:, VALUE].tolist()
        middle = f",{record.step},"
        calls = self._calls(record)
        counted = self._histograms(record)
        rows = zip(record.ids.tolist(), record.layouts.tolist(), numbers, values, counted, strict=True)
        for order, (series_id, layout, number, value, histogram) in enumerate(rows, record.first_order):
            table, lead, micro_step = self._lead(series_id)
            if table == SCALARS:
                line = f"{lead}{middle}{micro_step},{format_value(value)}\n"
            elif table in VALUE_NAMES:
                named = format_value(value)
                line = f"{lead}{middle}{micro_step},{order},{number},{named}{histogram}{self._tail(layout)}\n"
            elif table == COMMUNICATION_CALL:
                continue
            else:
                last = self._last(table, self.table.series[series_id], layout, calls) if table in EXTRA_COLUMNS else ""
                line = f"{lead}{middle}{micro_step},{order},{number}{histogram}{self._tail(layout)}{last}\n"
            texts.setdefault(table, []).append(line)
        return texts

    def _histograms(self, record: StepRecord) -> list[str]:
        """Return the text of each row's histogram with a comma before it, or nothing where tables have no column."""
        if not self.histograms:
            return [""] * len(record)
        return ["," + text for text in record.histograms.texts()] if record.histograms else [","] * len(record)

    def _append(self, step: int, texts: dict[str, list[str]]) -> None:
        """Append lines to their tables, all or none."""
        self._look_for_removed()
        begun: list[tuple[BinaryIO, int]] = []
        try:
            for table, lines in texts.items():
                data = "".join(lines).encode()
                known, new = self._file(table, step)
                size = known.file.seek(0, os.SEEK_END)
                begun.append((known.file, size))
                append_whole(known.file, data[_already_written(known.table.path, size, data) if new else 0 :])
                known.newest = max(known.newest, step)
        except OSError:
            for file, size in begun:
                cut_back(file, size)
            self._close_files()  # reopening cuts back any line that could not be cut here
            raise

    def _look_for_removed(self) -> None:
        """Close files that somebody has removed, and report their steps as lost."""
        thorough = time.monotonic() - self._checked_at >= LOOK_SECONDS
        if thorough:
            self._checked_at = time.monotonic()
        removed = {t: k for t, k in self._files.items() if is_removed(k.file, k.table.path, thorough=thorough)}
        for table, known in removed.items():
            del self._files[table]
            known.file.close()
        if removed:
            names = sorted(known.table.path.name for known in removed.values())
            first = min(known.table.first for known in removed.values())
            newest = max(known.newest for known in removed.values())
            self._lost(first, newest, f"{first_of(names)} removed while the run went on")

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
        """Return the text of a table's extra columns."""
        if table == GRADIENT_UNREDUCED:
            return f",{series.index}"
        op, group, call = series.index.split("|")
        sequence, seconds = calls.get(call, (math.nan, math.nan))
        ended = "" if math.isnan(seconds) else format_value(seconds)
        number = "" if math.isnan(sequence) else int(sequence)
        return f",{op},{quote(group)},{number},{bytes_of(self.table.layouts[layout])},{ended}"

    def roll_back(self, step: int) -> None:
        """Continue from an earlier step in new files; the old files stay."""
        self.close()
        self.start_step = step
        self.restart = max(next_restart(self.directory), self.restart + 1)
        self._levels = self._new_levels() if self._has_levels else None

    def close(self) -> None:
        """Close every file."""
        self._checked_at = -math.inf
        self._look_for_removed()
        self._close_files()
        if self._levels is not None:
            with contextlib.suppress(OSError):
                self._levels.close()

    def _close_files(self) -> None:
        for known in self._files.values():
            known.file.close()
        self._files.clear()

    def _lead(self, series_id: int) -> tuple[str, str, int]:
        """Return a series' table, the text before its step (constant over steps), and its micro-step."""
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
        """Return the text after the numbers: shape and dtype."""
        known = self._tails.get(layout_id)
        if known is None:
            layout = self.table.layouts[layout_id]
            known = self._tails[layout_id] = f",{quote(str(list(layout.shape)))},{layout.dtype}"
        return known

    def _file(self, table: str, step: int) -> tuple[_OpenTable, bool]:
        """Return the file for a step's rows, and whether it was just opened and already held rows."""
        block = step // self.steps_per_file * self.steps_per_file
        last = block + self.steps_per_file - 1
        known = self._files.get(table)
        if known is not None and known.table.last == last:
            return known, False
        if known is not None:
            del self._files[table]
            known.file.close()
            self._finished.append(known.table.path)
        first = max(block, self.start_step)
        name = TableFile(Path(), table, first, last, self.restart).file_name
        path = self.directory / name
        self.directory.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        file = path.open("ab", buffering=0)
        known = self._files[table] = _OpenTable(TableFile(path, table, first, last, self.restart), file, step)
        if file.tell() > 0:
            return known, True
        append_whole(file, (",".join(self.columns(table)) + "\n").encode())
        return known, False

    def columns(self, table: str) -> Sequence[str]:
        """Return the header of a table."""
        return columns_of(table, self.statistics, histograms=self.histograms)


def _already_written(path: Path, size: int, data: bytes) -> int:
    """Return how many bytes of `data`, in whole lines, a killed writer already left at the end of a file."""
    with path.open("rb") as file:
        file.seek(max(size - len(data), 0))
        end = file.read(len(data))
    length = len(data)
    while length > 0 and not end.endswith(data[:length]):
        length = data.rfind(b"\n", 0, length - 1) + 1
    return length


def next_restart(directory: Path) -> int:
    """Return the number of this start of a run: one more than the highest in the tables of `directory`."""
    found = [parse_file_name(path) for path in table_paths(directory)]
    return max((f.restart + 1 for f in found if f is not None), default=0)
