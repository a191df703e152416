"""Writes step records as TensorBoard event files while the run goes on."""

import math
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.summary_pb2 import Summary

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import COMMUNICATION_CALL, COMMUNICATION_ORDER, UPDATE, SeriesTable
from trainsentry.collectors.statistics import STATISTICS, VALUE
from trainsentry.exporters.exporter import Lost, nothing_lost
from trainsentry.exporters.files.whole_writes import LOOK_SECONDS
from trainsentry.exporters.tensorboard.dashboard import Dashboard
from trainsentry.exporters.tensorboard.event_file import EventFile, tag

MAX_FILE_BYTES: Final = 64 * 2**20
"""Size of an event file at which the next one begins, so that the disk quota can delete old ones."""

MAX_RAW_TAGS: Final = 5000
"""Tags of single series at most; above it they are all left out, as TensorBoard takes minutes to list 12,000."""

PICTURES_EVERY: Final = 100
"""Minimum steps between two pictures; in a long run a tenth of its steps, as TensorBoard keeps ten pictures."""


class TensorBoardWriter:
    """One run per rank: `tensorboard/rank<r>/events.out.tfevents…`.

    Every step has the numbers over all layers of each quantity. The statistics of single series whose names match one
    of `raw` are added while there are at most `max_raw_tags` of them (-1: no limit). Pictures are written every
    `renew_every` steps, less often in a long run, and at the end.

    A record is written whole or not at all, so it can be retried. If somebody removes the file, a new one is created,
    and `lost` gets the steps that went with it.
    """

    def __init__(
        self,
        directory: Path,
        table: SeriesTable,
        statistics: tuple[str, ...],
        *,
        raw: Sequence[str] = ("*",),
        max_raw_tags: int = MAX_RAW_TAGS,
        renew_every: int = PICTURES_EVERY,
        lost: Lost = nothing_lost,
    ) -> None:
        self.directory = directory
        self.table = table
        self.raw = tuple(raw)
        self.max_raw_tags = max_raw_tags
        self.renew_every = renew_every
        self._lost = lost
        self._first: int | None = None
        self._checked_at = 0.0
        self.dashboard = Dashboard(table)
        self._columns = [(name, STATISTICS.index(name)) for name in statistics]
        self._file: EventFile | None = None
        self._files = 0
        self._tags: dict[int, list[tuple[str, int]]] = {}
        self._count = 0
        self._too_many = False
        self._ids: bytes | None = None
        self._last: list[str] = []
        self._rows: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._value_columns: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._step = -1
        self._renewed: int | None = None

    def write(self, record: StepRecord) -> None:
        """Append one event with the values of the record.

        Raises:
            OSError: when the file cannot be written; then it holds nothing of the record.

        """
        self._look_for_removed()
        tags, numbers = self.dashboard.numbers(record)
        ids = record.ids.tobytes()
        if ids != self._ids:
            self._choose(record)
            self._ids, self._last = ids, self._last + tags
        file = self._open()
        size, renewed = file.size, self._renewed
        try:
            raw = record.values[self._rows, self._value_columns].tolist()
            file.write(record.step, record.time, self._last, raw + numbers)
            self._step = record.step
            self._renew(record.step)
        except OSError:
            file.cut_back(size)
            self._renewed = renewed
            raise
        self._first = record.step if self._first is None else self._first
        if file.size >= MAX_FILE_BYTES:
            file.close()
            self._file, self._first, self._files = None, None, self._files + 1

    def _renew(self, step: int) -> None:
        """Append the current pictures, if they are due."""
        first = self._renewed is None
        if self._renewed is None or abs(step - self._renewed) >= max(self.renew_every, self._renewed // 10):
            self._renewed = step
            if not first:
                self._append(self.dashboard.pages())

    def _look_for_removed(self) -> None:
        """Close a file that somebody has removed, and report its steps as lost."""
        now = time.monotonic()
        thorough = now - self._checked_at >= LOOK_SECONDS
        self._checked_at = now if thorough else self._checked_at
        if self._file is None or not self._file.is_removed(thorough=thorough):
            return
        self._file.close()
        if self._first is not None:
            self._lost(self._first, self._step, f"{self._file.path.name} removed while the run went on")
        self._file, self._first, self._files = None, None, self._files + 1

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append scalars that no record holds, such as the monitor's own cost."""
        if self._file is not None:
            tags = [tag(name, "value", name, 0, scalar=True) for name in scalars]
            self._file.write(step, time.time(), tags, list(scalars.values()))

    def write_incident(self, incident: Any) -> None:
        """Append an incident as text, and the number of incidents."""
        value = self.dashboard.incident(incident)
        if value is not None:
            self._append([value])
        step = max(self._step, incident.first_seen, 0)
        self._open().write(step, time.time(), ["scalars/incidents"], [float(len(self.dashboard.incidents))])

    def write_settings(self, run: Mapping[str, Any]) -> None:
        """Append the run's configuration."""
        self._append(self.dashboard.settings(run))

    def close(self) -> None:
        """Append the final pictures, and close the event file."""
        self._checked_at = -math.inf
        self._look_for_removed()
        if self._file is not None:
            self._append(self.dashboard.pages())
            self._file.close()
            self._file = None

    def _open(self) -> EventFile:
        if self._file is None:
            self._file = EventFile(self.directory, f".{self._files}")
        return self._file

    def _append(self, values: Sequence[Summary.Value]) -> None:
        if values:
            self._open().append(max(self._step, 0), time.time(), values)

    def _choose(self, record: StepRecord) -> None:
        """Choose the single series to write for records with these rows."""
        pairs = [self._tags_of(series_id) for series_id in record.ids.tolist()]
        if self._too_many:
            scalar = [self.table.series[series_id].scalar for series_id in record.ids.tolist()]
            pairs = [found if keep else [] for found, keep in zip(pairs, scalar, strict=True)]
        self._last = [name for found in pairs for name, _ in found]
        self._rows = np.repeat(np.arange(len(pairs)), [len(found) for found in pairs])
        self._value_columns = np.asarray([column for found in pairs for _, column in found], np.intp)

    def _tags_of(self, series_id: int) -> list[tuple[str, int]]:
        found = self._tags.get(series_id)
        if found is None:
            found = self._tags[series_id] = self._new_tags(series_id)
            if not self.table.series[series_id].scalar:
                self._count += len(found)
                self._too_many |= 0 <= self.max_raw_tags < self._count
        return found

    def _new_tags(self, series_id: int) -> list[tuple[str, int]]:
        s = self.table.series[series_id]
        if s.quantity in {COMMUNICATION_CALL, COMMUNICATION_ORDER}:
            return []
        if s.scalar:
            return [(tag(s.quantity, "value", s.name, s.micro_step, scalar=True), VALUE)]
        if not any(fnmatchcase(s.name, pattern) for pattern in self.raw):
            return []
        columns = [*self._columns, ("ratio", VALUE)] if s.quantity == UPDATE else self._columns
        return [(tag(s.quantity, name, s.name, s.micro_step, vpp_stage=s.vpp_stage), i) for name, i in columns]
