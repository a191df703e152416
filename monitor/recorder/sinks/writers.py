"""The exporters that write the records of one directory, each in a thread that may fail without the others."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainsentry.anomaly.incident import Incident
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.exporters.exporter import (
    Exporter,
    ExporterEntry,
    IncidentExporter,
    OpeningExporter,
    RestartingExporter,
    ScalarExporter,
    SettingsExporter,
)
from trainsentry.exporters.registry import make_exporter
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.sinks.gaps import Gaps
from trainsentry.monitor.recorder.sinks.writer_thread import FINISH_SECONDS, WriterThread

LOG_SECONDS: Final = 45.0
"""Seconds that the end of an exporter that is not patient may take: it sends its queue, and some libraries upload
files then."""

GLOBAL: Final = "global"
"""The folder of the statistics over all ranks."""


class Writers:
    """Writes records to `directory` with every exporter that the configuration switches on.

    Records that an exporter does not write become one of the `gaps`. `restart` is the number of this start in the
    directory.
    """

    def __init__(
        self, settings: RecorderSettings, directory: Path, table: SeriesTable, restart: int, gaps: Gaps
    ) -> None:
        self.restart = restart
        self.exporters: list[tuple[WriterThread, Exporter]] = []
        if settings.quiet:
            return
        is_global = directory.name == GLOBAL
        for entry, block in settings.exporters_at("record"):
            if not _runs(entry, settings.rank, is_global=is_global):
                continue
            name = f"global {entry.key}" if is_global else entry.key
            place = settings.place(directory, table, restart, partial(gaps.add, name))
            exporter: Exporter = make_exporter(entry, block, place)
            sink = WriterThread(name, gaps, settings.max_wait, patient=entry.patient)
            if isinstance(exporter, OpeningExporter):
                sink.submit(exporter.open, settings.start_step)
            self.exporters.append((sink, exporter))

    @property
    def sinks(self) -> list[WriterThread]:
        """The threads of the exporters."""
        return [sink for sink, _ in self.exporters]

    def write(self, record: StepRecord) -> None:
        """Have every exporter write a record."""
        for sink, exporter in self.exporters:
            sink.submit(partial(exporter.write, record), record.step, record.nbytes)
        for sink, _ in self.exporters:
            sink.settle()

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Have numbers written that belong to no record, by the exporters that show them."""
        for sink, exporter in self.exporters:
            if isinstance(exporter, ScalarExporter):
                _do(sink, partial(exporter.write_scalars, step, scalars), step)

    def write_incident(self, incident: Incident) -> None:
        """Have an incident written beside the records, by the exporters that show it."""
        for sink, exporter in self.exporters:
            if isinstance(exporter, IncidentExporter):
                _do(sink, partial(exporter.write_incident, incident), incident.last_seen)

    def write_settings(self, run: Mapping[str, Any], step: int) -> None:
        """Have the content of `run.json` written beside the records, by the exporters that show it."""
        for sink, exporter in self.exporters:
            if isinstance(exporter, SettingsExporter):
                _do(sink, partial(exporter.write_settings, run), step)

    def roll_back(self, step: int) -> int:
        """Continue from an earlier step in new files; return the number of the start that they carry."""
        for sink, exporter in self.exporters:
            if isinstance(exporter, RestartingExporter):
                _do(sink, partial(exporter.roll_back, step), step)
                self.restart = max(self.restart, exporter.restart)
        return self.restart

    def close(self, step: int) -> None:
        """Close every exporter."""
        for sink, exporter in self.exporters:
            sink.submit(exporter.close, step, last=True)
            sink.close(FINISH_SECONDS if sink.patient else LOG_SECONDS)


def _runs(entry: ExporterEntry, rank: int, *, is_global: bool) -> bool:
    """Return whether an exporter writes the records of a directory: `global`, or a rank's own."""
    if is_global:
        return "global" in entry.places
    return "rank" in entry.places or (rank == 0 and "rank 0" in entry.places)


def _do(sink: WriterThread, job: Callable[[], object], step: int) -> None:
    sink.submit(job, step)
    sink.settle()
