"""Writes step records as TensorBoard event files, while the run goes on."""

import time
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import COMMUNICATION_CALL, UPDATE, SeriesTable
from trainsentry.collectors.statistics import STATISTICS, VALUE
from trainsentry.exporters.event_file import EventFile, tag

MAX_FILE_BYTES: Final = 64 * 2**20
"""Size at which a new event file is begun, so that old ones can go when the disk quota asks for it."""


class TensorBoardWriter:
    """One run per rank: `tensorboard/rank<r>/events.out.tfevents…`."""

    def __init__(self, directory: Path, table: SeriesTable, statistics: tuple[str, ...]) -> None:
        self.directory = directory
        self.table = table
        self._columns = [(name, STATISTICS.index(name)) for name in statistics]
        self._file: EventFile | None = None
        self._files = 0
        self._tags: dict[int, list[tuple[str, int]]] = {}
        self._ids: bytes | None = None
        self._last: list[str] = []
        self._rows: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._places: npt.NDArray[np.intp] = np.empty(0, np.intp)

    def write(self, record: StepRecord) -> None:
        """Append one event with every value of the record."""
        if self._file is None:
            self._file = EventFile(self.directory, f".{self._files}")
        ids = record.ids.tobytes()
        if ids != self._ids:
            tags = [self._tags_of(series_id) for series_id in record.ids.tolist()]
            self._ids, self._last = ids, [name for pairs in tags for name, _ in pairs]
            self._rows = np.repeat(np.arange(len(tags)), [len(pairs) for pairs in tags])
            self._places = np.asarray([column for pairs in tags for _, column in pairs], np.intp)
        self._file.write(record.step, record.time, self._last, record.values[self._rows, self._places].tolist())
        if self._file.size >= MAX_FILE_BYTES:
            self._file.close()
            self._file, self._files = None, self._files + 1

    def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
        """Append scalars that are in no record, such as the monitor's own cost."""
        if self._file is not None:
            tags = [tag(name, "value", name, 0, scalar=True) for name in scalars]
            self._file.write(step, time.time(), tags, list(scalars.values()))

    def close(self) -> None:
        """Close the event file."""
        if self._file is not None:
            self._file.close()

    def _tags_of(self, series_id: int) -> list[tuple[str, int]]:
        found = self._tags.get(series_id)
        if found is None:
            s = self.table.series[series_id]
            if s.quantity == COMMUNICATION_CALL:
                found = []
            elif s.scalar:
                found = [(tag(s.quantity, "value", s.name, s.micro_step, scalar=True), VALUE)]
            else:
                found = [
                    (tag(s.quantity, name, s.name, s.micro_step, vpp_stage=s.vpp_stage), i) for name, i in self._columns
                ]
                if s.quantity == UPDATE:
                    found.append((tag(s.quantity, "ratio", s.name, s.micro_step, vpp_stage=s.vpp_stage), VALUE))
            self._tags[series_id] = found
        return found
