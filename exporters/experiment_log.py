"""The exporters to Weights & Biases and MLflow: numbers over all layers, logged scalars and incidents, from rank 0.

Those libraries take their keys and tokens from the environment themselves.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import VALUE
from trainsentry.exporters.exporter import ExporterEntry, ExportPlace, Needed, setting


@dataclass(frozen=True)
class Wandb:
    """Numbers over all layers, logged scalars and incidents to Weights & Biases, from rank 0."""

    project: str = setting("trainsentry", "Name of the project.", min_length=1)
    entity: str | None = setting(None, "User or team. `null`: the default of your account.")
    name: str | None = setting(None, "Name of the run. `null`: one that Weights & Biases makes up.")
    mode: Literal["online", "offline"] = setting("online", "`offline` writes to disk only.")


@dataclass(frozen=True)
class Mlflow:
    """Numbers over all layers, logged scalars and incidents to MLflow, from rank 0."""

    experiment: str = setting("trainsentry", "Name of the experiment.", min_length=1)
    tracking_uri: str | None = setting(None, "Tracking server. `null`: MLflow's own default.")
    name: str | None = setting(None, "Name of the run. `null`: one that MLflow makes up.")


class Backend(Protocol):
    """The library that keeps the experiment. One thread calls it."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers by name."""

    def incident(self, incident: Mapping[str, Any]) -> None:
        """Log an incident."""

    def finish(self) -> None:
        """End the run."""


class ExperimentLog:
    """Logs records to a backend, which `begin` makes; it waits for the backend's answers.

    An error of the library that stems from the network or the file system becomes an `OSError`, so that the recorder
    tries again.
    """

    def __init__(self, name: str, table: SeriesTable, begin: Callable[[], Backend]) -> None:
        from trainsentry.exporters.tensorboard.dashboard import Dashboard  # imports tensorboard: half a second

        self.name = name
        self.table = table
        self._begin = begin
        self._backend: Backend | None = None
        self._dashboard = Dashboard(table)
        self._logged: set[int] = set()

    def open(self) -> None:
        """Begin the run: the libraries take seconds to load. Without this, the first record begins it."""
        with _as_os_error():
            self._begun()

    def write(self, record: StepRecord) -> None:
        """Log the numbers of a record."""
        tags, values = self._dashboard.numbers(record)
        numbers = dict(zip(tags, values, strict=True))
        for row, series_id in enumerate(record.ids.tolist()):
            series = self.table.series[series_id]
            if series.scalar:
                numbers[series.name] = float(record.values[row, VALUE])
        with _as_os_error():
            self._begun().log(record.step, numbers)

    def write_incident(self, incident: Any) -> None:
        """Log an incident, once."""
        if incident.id not in self._logged:
            with _as_os_error():
                self._begun().incident(incident.to_json())
            self._logged.add(incident.id)

    def close(self) -> None:
        """End the run, if it has begun."""
        if self._backend is not None:
            with _as_os_error():
                self._backend.finish()

    def _begun(self) -> Backend:
        if self._backend is None:
            self._backend = self._begin()
        return self._backend


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn an error that stems from the network or the file system into an `OSError`.

    Raises:
        OSError: when the error, or one in the chain of its causes, is one.

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

    def __init__(self, block: Wandb, directory: str) -> None:
        import wandb

        self._run = wandb.init(
            project=block.project,
            entity=block.entity,
            name=block.name,
            mode=block.mode,
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

    def __init__(self, block: Mlflow) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(block.tracking_uri)
        name = block.experiment
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=block.name).info.run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers by name."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def incident(self, incident: Mapping[str, Any]) -> None:
        """Log the incident as a text, and the first suspect as a tag."""
        self._client.log_text(self._id, str(incident["summary"]), f"incidents/{incident['id']}.txt")
        self._client.set_tag(self._id, "trainsentry.first_suspect", f"{incident['name']} ({incident['quantity']})")

    def finish(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


def wandb_log(block: Wandb, place: ExportPlace) -> ExperimentLog:
    """Return the log to Weights & Biases; its files lie under `<output_dir>/wandb`."""
    return ExperimentLog("wandb", place.table, partial(WandbRun, block, str(place.output_dir)))


def mlflow_log(block: Mlflow, place: ExportPlace) -> ExperimentLog:
    """Return the log to MLflow."""
    return ExperimentLog("mlflow", place.table, partial(MlflowRun, block))


WANDB = ExporterEntry(
    "wandb",
    wandb_log,
    Wandb,
    places=("rank 0",),
    patient=False,
    needs=(Needed("wandb", "wandb is not installed; allowed: pip install wandb"),),
)
MLFLOW = ExporterEntry(
    "mlflow",
    mlflow_log,
    Mlflow,
    places=("rank 0",),
    patient=False,
    needs=(Needed("mlflow", "mlflow is not installed; allowed: pip install mlflow"),),
)
