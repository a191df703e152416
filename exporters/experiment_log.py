"""Numbers over all layers, logged scalars and incidents for Weights & Biases and MLflow, where they are installed.

Keys and tokens are those libraries' own business: they take them from the environment.
"""

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import VALUE
from trainsentry.exporters.dashboard import Dashboard

MAX_WAITING: Final = 1000
"""Steps that wait for a library that is slow; then the oldest are left out, and the training is not waited for."""

LAST_SECONDS: Final = 20.0
"""How long the end of a run waits for what is still to be sent."""


class Backend(Protocol):
    """Where an experiment is logged. It is called from one thread of its own; what it raises ends it."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers by name."""

    def incident(self, incident: Mapping[str, Any]) -> None:
        """Log an incident."""

    def finish(self) -> None:
        """End the run."""


class ExperimentLog:
    """Hands records to a backend through a bounded queue. `begin` makes the backend, in its own thread."""

    def __init__(self, name: str, table: SeriesTable, begin: Any) -> None:
        self.name = name
        self.table = table
        self.left_out = 0
        self.error: str | None = None
        self._begin = begin
        self._dashboard = Dashboard(table)
        self._told: set[int] = set()
        self._jobs: queue.Queue[Any] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"trainsentry-{name}", daemon=True)
        self._thread.start()

    def write(self, record: StepRecord) -> None:
        """Have the numbers of a record logged.

        Raises:
            RuntimeError: when the backend has failed: then it is switched off.

        """
        if self.error is not None:
            raise RuntimeError(self.error)
        tags, values = self._dashboard.numbers(record)
        numbers = dict(zip(tags, values, strict=True))
        for row, series_id in enumerate(record.ids.tolist()):
            series = self.table.series[series_id]
            if series.scalar:
                numbers[series.name] = float(record.values[row, VALUE])
        self._put(("log", record.step, numbers))

    def write_incident(self, incident: Any) -> None:
        """Have an incident logged, once."""
        if incident.id not in self._told:
            self._told.add(incident.id)
            self._put(("incident", incident.to_json(), None))

    def close(self) -> None:
        """Log what waits, as far as that takes no longer than LAST_SECONDS, and end the run."""
        self._put(("finish", None, None))
        self._thread.join(LAST_SECONDS)

    def _put(self, job: Any) -> None:
        while True:
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                try:
                    self._jobs.get_nowait()
                    self.left_out += 1
                except queue.Empty:
                    continue
            else:
                return

    def _work(self) -> None:
        try:
            backend = self._begin()
            while True:
                kind, first, second = self._jobs.get()
                if kind == "log":
                    backend.log(first, second)
                elif kind == "incident":
                    backend.incident(first)
                else:
                    backend.finish()
                    return
        except Exception as error:  # noqa: BLE001 - whatever the library raises ends this log and nothing else
            self.error = f"{self.name}: {type(error).__name__}: {error}"


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
