"""Numbers over all layers, logged scalars and incidents for Weights & Biases and MLflow, where they are installed.

Keys and tokens are those libraries' own business: they take them from the environment.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import VALUE
from trainsentry.exporters.tensorboard.dashboard import Dashboard


class Backend(Protocol):
    """Where an experiment is logged. It is called from one thread."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers by name."""

    def incident(self, incident: Mapping[str, Any]) -> None:
        """Log an incident."""

    def finish(self) -> None:
        """End the run."""


class ExperimentLog:
    """Logs records to a backend, which `begin` makes; it waits for the backend's answers.

    What the library raises because something did not answer is an `OSError` here: it may be asked again.
    """

    def __init__(self, name: str, table: SeriesTable, begin: Callable[[], Backend]) -> None:
        self.name = name
        self.table = table
        self._begin = begin
        self._backend: Backend | None = None
        self._dashboard = Dashboard(table)
        self._told: set[int] = set()

    def open(self) -> None:
        """Begin the run; the first record does so as well."""
        with _told_apart():
            self._begun()

    def write(self, record: StepRecord) -> None:
        """Log the numbers of a record."""
        tags, values = self._dashboard.numbers(record)
        numbers = dict(zip(tags, values, strict=True))
        for row, series_id in enumerate(record.ids.tolist()):
            series = self.table.series[series_id]
            if series.scalar:
                numbers[series.name] = float(record.values[row, VALUE])
        with _told_apart():
            self._begun().log(record.step, numbers)

    def write_incident(self, incident: Any) -> None:
        """Log an incident, once."""
        if incident.id not in self._told:
            with _told_apart():
                self._begun().incident(incident.to_json())
            self._told.add(incident.id)

    def close(self) -> None:
        """End the run, if it has begun."""
        if self._backend is not None:
            with _told_apart():
                self._backend.finish()

    def _begun(self) -> Backend:
        if self._backend is None:
            self._backend = self._begin()
        return self._backend


@contextmanager
def _told_apart() -> Iterator[None]:
    """Let what stems from the network or the file system out as an `OSError`.

    Raises:
        OSError: where the error, or one that it was raised for, is one.

    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        source: BaseException | None = error
        while source is not None and not isinstance(source, OSError):
            source = source.__cause__ or source.__context__
        if source is None:
            raise
        raise OSError(f"{type(error).__name__}: {error}") from error


class WandbRun:
    """A run of Weights & Biases."""

    def __init__(self, settings: Mapping[str, Any], directory: str) -> None:
        import wandb

        self._run = wandb.init(
            project=settings["project"],
            entity=settings["entity"],
            name=settings["name"],
            mode=settings["mode"],
            dir=directory,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers by name."""
        self._run.log({"step": step, **numbers})

    def incident(self, incident: Mapping[str, Any]) -> None:
        """Send an alert, and keep the incident in the run's summary."""
        level = "ERROR" if incident["severity"] == "critical" else "WARN"
        self._run.alert(title=f"{incident['kind']}: {incident['name']}"[:64], text=incident["summary"], level=level)
        self._run.summary[f"incident_{incident['id']}"] = incident["summary"]

    def finish(self) -> None:
        """End the run."""
        self._run.finish()


class MlflowRun:
    """A run of MLflow."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(settings["tracking_uri"])
        name = settings["experiment"]
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=settings["name"]).info.run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers by name."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def incident(self, incident: Mapping[str, Any]) -> None:
        """Keep the incident as a text, and the first suspect as a tag."""
        self._client.log_text(self._id, str(incident["summary"]), f"incidents/{incident['id']}.txt")
        self._client.set_tag(self._id, "trainsentry.first_suspect", f"{incident['name']} ({incident['quantity']})")

    def finish(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)
