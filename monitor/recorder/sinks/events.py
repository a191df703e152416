"""The exporters that take no records: they run at a renewed status, at an incident, and at the end of the run."""

import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainsentry.collectors.series import SeriesTable
from trainsentry.exporters.exporter import StatusExporter
from trainsentry.exporters.registry import make_exporter
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.sinks.gaps import Gaps
from trainsentry.monitor.recorder.sinks.writers import LAST_SECONDS, WriterThread


class StatusExporters:
    """Exporters that show the present state. At most one renewal waits in each one's thread: it shows the newest."""

    def __init__(self, settings: RecorderSettings, directory: Path, table: SeriesTable, gaps: Gaps) -> None:
        self.exporters: list[tuple[WriterThread, StatusExporter]] = []
        for entry, block in settings.exporters_at("status"):
            exporter: StatusExporter = make_exporter(entry, block, settings.place(directory, table))
            sink = WriterThread(entry.key, gaps, settings.max_wait, patient=entry.patient, kept_bytes=1)
            sink.submit(exporter.begin, max(settings.start_step, 0))
            self.exporters.append((sink, exporter))

    @property
    def sinks(self) -> list[WriterThread]:
        """The threads of the exporters."""
        return [sink for sink, _ in self.exporters]

    def renew(self, step: int, *, now: bool) -> None:
        """Show the state with each exporter; one that cannot gets a gap at this step."""
        for sink, exporter in self.exporters:
            sink.settle()
            if sink.trouble or not sink.is_busy:
                sink.submit(lambda e=exporter: e.renew(now=now), max(step, 0))  # type: ignore[misc]
                sink.settle()

    def close(self) -> None:
        """End the threads."""
        for sink in self.sinks:
            sink.close(LAST_SECONDS)


class Alerts:
    """Exporters that send each incident; `failed` receives the key, the fault and the step of one that fails."""

    def __init__(
        self,
        settings: RecorderSettings,
        directory: Path,
        table: SeriesTable,
        failed: Callable[[str, Exception, int], None],
    ) -> None:
        self._failed = failed
        self._alerts = [
            (entry.key, make_exporter(entry, block, settings.place(directory, table)))
            for entry, block in settings.exporters_at("incident")
        ]

    def send(self, incident: Mapping[str, Any], step: int) -> None:
        """Start to send an incident's line."""
        for key, alert in self._alerts:
            try:
                alert(incident)
            except Exception as error:  # noqa: BLE001 - an alert that fails must not stop detection
                self._failed(key, error, step)


def begin_last_exports(settings: RecorderSettings, directory: Path, table: SeriesTable, incidents: int) -> None:
    """Start the exporters that run at the end; `incidents` is the run's number of incidents."""
    for entry, block in settings.exporters_at("end"):
        try:
            make_exporter(entry, block, settings.place(directory, table))(incidents)
        except Exception:  # noqa: BLE001 - the run is over: only standard error is left
            traceback.print_exc(file=sys.stderr)
