"""The writers of a directory's tables and event file, each with a thread that may fail without the others."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainsentry.anomaly.incident import Incident
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.exporter import Exporter, ScalarExporter
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.sinks.gaps import Gaps
from trainsentry.monitor.recorder.sinks.writer_thread import FINISH_SECONDS, WriterThread

LOG_SECONDS: Final = 45.0
"""How long the end of an experiment's log is waited for: what waits is sent, and some libraries upload files then."""

GLOBAL: Final = "global"
"""The folder of what was put together from all ranks."""


class Writers:
    """Writes records to `directory` as the configuration asks for; what is not written becomes one of the `gaps`."""

    def __init__(
        self,
        hello: RecorderSettings,
        directory: Path,
        table: SeriesTable,
        restart: int,
        gaps: Gaps,
    ) -> None:
        self.restart = restart
        self.gaps = gaps
        where = "global " if directory.name == GLOBAL else ""
        self.exporters: list[tuple[WriterThread, Exporter]] = []
        if hello.quiet:
            return
        if hello.csv_steps_per_file is not None:
            csv = CsvWriter(
                directory,
                table,
                hello.statistics,
                steps_per_file=hello.csv_steps_per_file,
                start_step=hello.start_step,
                restart=restart,
                finished_blocks=hello.finished_blocks,
                lost=partial(gaps.add, f"{where}csv"),
            )
            self.exporters.append((WriterThread(f"{where}csv", gaps, hello.max_wait), csv))
        if hello.rank == 0 and not where:
            self._add_experiment_logs(hello, table)
        if hello.tensorboard is not None:
            from trainsentry.exporters.tensorboard.writer import TensorBoardWriter

            events = Path(hello.output_dir) / "tensorboard" / directory.name
            name = f"{where}tensorboard"
            writer = TensorBoardWriter(
                events, table, hello.statistics, lost=partial(gaps.add, name), **hello.tensorboard
            )
            self.exporters.append((WriterThread(name, gaps, hello.max_wait), writer))

    def _add_experiment_logs(self, hello: RecorderSettings, table: SeriesTable) -> None:
        if hello.wandb is None and hello.mlflow is None:
            return
        from trainsentry.exporters.experiment_log import ExperimentLog, MlflowRun, WandbRun

        logs = []
        if hello.wandb is not None:
            logs.append(ExperimentLog("wandb", table, partial(WandbRun, hello.wandb, hello.output_dir)))
        if hello.mlflow is not None:
            logs.append(ExperimentLog("mlflow", table, partial(MlflowRun, hello.mlflow)))
        for log in logs:
            sink = WriterThread(log.name, self.gaps, hello.max_wait, patient=False)
            sink.submit(log.open, hello.start_step)  # these libraries take seconds to load
            self.exporters.append((sink, log))

    @property
    def sinks(self) -> list[WriterThread]:
        """The places that are written."""
        return [sink for sink, _ in self.exporters]

    def write(self, record: StepRecord) -> None:
        """Have every writer write a record."""
        for sink, exporter in self.exporters:
            sink.submit(lambda e=exporter: e.write(record), record.step, record.nbytes)  # type: ignore[misc]
        for sink, _ in self.exporters:
            sink.settle()

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Have numbers that belong to no record written, where there is a place for them."""
        for sink, exporter in self.exporters:
            if isinstance(exporter, ScalarExporter):
                sink.submit(lambda e=exporter: e.write_scalars(step, scalars), step)  # type: ignore[misc]
                sink.settle()

    def write_incident(self, incident: Incident) -> None:
        """Have an incident shown beside the records, where there is a place for it."""
        self._show("write_incident", incident, incident.last_seen)

    def write_settings(self, run: Mapping[str, Any], step: int) -> None:
        """Have the run's configuration shown beside the records, where there is a place for it."""
        self._show("write_settings", run, step)

    def _show(self, what: str, content: Any, step: int) -> None:
        for sink, exporter in self.exporters:
            show = getattr(exporter, what, None)
            if show is not None:
                sink.submit(lambda f=show: f(content), step)  # type: ignore[misc]
                sink.settle()

    def roll_back(self, step: int) -> int:
        """Go on from an earlier step in new files; return the number of the start that they carry."""
        for sink, exporter in self.exporters:
            if isinstance(exporter, CsvWriter):
                sink.submit(lambda e=exporter: e.roll_back(step), step)  # type: ignore[misc]
                sink.settle()
                self.restart = exporter.restart
        return self.restart

    def close(self, step: int) -> None:
        """Close every writer."""
        for sink, exporter in self.exporters:
            sink.submit(exporter.close, step, last=True)
            sink.close(FINISH_SECONDS if sink.patient else LOG_SECONDS)
