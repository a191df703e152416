"""The writers of a directory's tables and event file, each with a thread that may fail without the others."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainsentry.anomaly.incident import Incident
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.exporters.csv_writer import CsvWriter
from trainsentry.exporters.exporter import Exporter, ScalarExporter
from trainsentry.monitor.recorder.hello import Hello
from trainsentry.monitor.recorder.sink import Sink

LOG_SECONDS: Final = 25.0
"""How long the end of an experiment's log is waited for; its writes only fill a queue."""


class Writers:
    """Writes records to `directory` as the configuration asks for; `failed` hears of a writer that is switched off."""

    def __init__(
        self,
        hello: Hello,
        directory: Path,
        table: SeriesTable,
        restart: int,
        failed: Callable[[str, str, int], None],
    ) -> None:
        self.restart = restart
        self.exporters: list[tuple[Sink, Exporter]] = []
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
            )
            self.exporters.append((Sink("csv", hello.max_wait, failed), csv))
        if hello.rank == 0 and directory.name != "global":
            self._add_experiment_logs(hello, table, failed)
        if hello.tensorboard is not None:
            from trainsentry.exporters.tensorboard_writer import TensorBoardWriter

            events = Path(hello.output_dir) / "tensorboard" / directory.name
            writer = TensorBoardWriter(events, table, hello.statistics, **hello.tensorboard)
            self.exporters.append((Sink("tensorboard", hello.max_wait, failed), writer))

    def _add_experiment_logs(self, hello: Hello, table: SeriesTable, failed: Callable[[str, str, int], None]) -> None:
        if hello.wandb is None and hello.mlflow is None:
            return
        from trainsentry.exporters.experiment_log import ExperimentLog, MlflowRun, WandbRun

        if hello.wandb is not None:
            log = ExperimentLog("wandb", table, partial(WandbRun, hello.wandb, hello.output_dir))
            self.exporters.append((Sink("wandb", LOG_SECONDS, failed), log))
        if hello.mlflow is not None:
            log = ExperimentLog("mlflow", table, partial(MlflowRun, hello.mlflow))
            self.exporters.append((Sink("mlflow", LOG_SECONDS, failed), log))

    def write(self, record: StepRecord) -> None:
        """Have every writer write a record."""
        for sink, exporter in self.exporters:
            sink.submit(lambda e=exporter: e.write(record), record.step)  # type: ignore[misc]
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

    def begin_again(self, step: int) -> int:
        """Go on from an earlier step in new files; return the number of the start that they carry."""
        for sink, exporter in self.exporters:
            if isinstance(exporter, CsvWriter):
                sink.submit(lambda e=exporter: e.begin_again(step), step)  # type: ignore[misc]
                sink.settle()
                self.restart = exporter.restart
        return self.restart

    def close(self, step: int) -> None:
        """Close every writer."""
        for sink, exporter in self.exporters:
            sink.submit(exporter.close, step)
            sink.settle()
            sink.close()
