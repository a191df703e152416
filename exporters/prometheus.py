"""Metrics of a run for Prometheus: aggregates and incidents, never a series for each parameter.

Each request reads the run's own files. So one endpoint serves all ranks of a run, and the training process counts
nothing. A counter is there from zero on, so that `increase()` sees the first incident; a label never changes its value
while a run goes on; a time is a number of seconds since the epoch. Each metric has the label `run`, so that one node
can hold several runs.
"""

import errno
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trainsentry.exporters.files.foreign_files import InputError, read_lines
from trainsentry.exporters.metrics_server import start_http_server
from trainsentry.exporters.run_reader import RecordedRun, last_scalars, read_run
from trainsentry.exporters.run_state import STATES, RunState, state_of_rank, state_of_run, troubles_of

MAX_RANKS: Final = 64
"""Up to this many ranks, each has its number as the label `rank`; of larger runs only `min` and `max` are shown."""

SCALARS: Final = ("loss", "learning_rate", "grad_norm", "loss_scale")
"""Logged scalars that become metrics."""

_GAUGES: Final[tuple[tuple[str, str, Callable[[Mapping[str, Any]], Any]], ...]] = (
    ("step", "The last step that was recorded.", lambda s: s.get("step")),
    ("status_timestamp_seconds", "Time at which the rank last renewed its status.", lambda s: s.get("updated")),
    ("recorder_lag_steps", "Steps that the recorder is behind the training.", lambda s: s.get("lag_steps")),
    ("recorder_lag_seconds", "Seconds that the recorder is behind the training.", lambda s: s.get("lag_seconds")),
    ("step_seconds", "Median time of the newest steps.", lambda s: s["cost"]["step_seconds"]),
    ("overhead_ratio", "The monitor's share of the training's time.", lambda s: s["cost"]["recent_share"]),
    ("troubles", "Parts of the monitor that have failed.", lambda s: len(troubles_of(s))),
)
_COUNTERS: Final = (
    ("anomalies", "Abnormal values found."),
    ("overflow_steps", "Steps with an overflow."),
    ("skipped_steps", "Steps that the loss scaler skipped."),
    ("dropped_records", "Records of steps that found no room and reached no file."),
)
"""Metrics of a rank: name, help, and the number in its `status.json`; a counter has its name there."""


class RunCollector:
    """Collects a run's metrics from the files in its directory.

    `name` is the value of the label `run`, the directory's path by default. With `ending`, ranks that still run do not
    count for the state: nobody may be left to say how the run ended.
    """

    def __init__(self, root: Path, name: str | None = None, *, ending: bool = False) -> None:
        self.root = root
        self.name = name or str(root.absolute())
        self.ending = ending

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        run = read_run(self.root)
        yield from self._of_run(run)
        yield from self._incidents()
        for name, text, read in _GAUGES:
            yield self._by_rank(GaugeMetricFamily(f"trainsentry_{name}", text, labels=_LABELS), run, read)
        for name, text in _COUNTERS:
            counter = CounterMetricFamily(f"trainsentry_{name}", text, labels=_LABELS)
            yield self._by_rank(counter, run, partial(_counted, name=name))
        first = next(iter(run.ranks), 0)
        for name, points in last_scalars(self.root / f"rank{first}", 1 << 14).items():
            if name in SCALARS and points:
                yield self._gauge(name, f"The newest {name}.", points[-1][1])

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        metric = GaugeMetricFamily(f"trainsentry_{name}", text, labels=("run",))
        if value is not None:
            metric.add_metric([self.name], value)
        return metric

    def _of_run(self, run: RecordedRun) -> Iterator[Metric]:
        labels = ("run", "output_dir", "framework", "accelerator")
        info = GaugeMetricFamily("trainsentry_run_info", "The run.", labels=labels)
        settings = [str(run.settings.get(key, "")) for key in labels[2:]]
        info.add_metric([self.name, str(self.root), *settings], 1)
        yield info
        text = "How the run stands: 1 for one of running, finished, stopped and crashed."
        states = GaugeMetricFamily("trainsentry_run_state", text, labels=("run", "state"))
        present = self._state(run)
        for state in STATES:
            states.add_metric([self.name, state], float(state == present))
        yield states
        yield self._gauge("start_timestamp_seconds", "Start of the run.", run.settings.get("start_time"))
        yield self._gauge("ranks", "Ranks that have written something.", len(run.ranks))
        running = sum(state_of_rank(status) == "running" for status in run.ranks.values())
        yield self._gauge("ranks_running", "Ranks at work.", running)

    def _state(self, run: RecordedRun) -> RunState:
        state = state_of_run(run)
        if state != "running" or not self.ending:
            return state
        found = [state_of_rank(status) for status in run.ranks.values()]
        return next((end for end in ("crashed", "stopped", "finished") if end in found), state)

    def _incidents(self) -> Iterator[Metric]:
        counts = _count_incidents(self.root / "incidents.jsonl")
        for name, text, value in (
            ("incidents", "Incidents so far.", counts.all),
            ("critical_incidents", "Incidents so far that are, or were, critical.", counts.critical),
        ):
            metric = CounterMetricFamily(f"trainsentry_{name}", text, labels=("run",))
            metric.add_metric([self.name], value)
            yield metric
        yield self._gauge("last_incident_step", "The first step of the newest incident.", counts.newest_step)

    def _by_rank(self, metric: Any, run: RecordedRun, read: Callable[[Mapping[str, Any]], Any]) -> Metric:
        values: dict[int, float] = {}
        for rank, status in run.ranks.items():
            try:
                values[rank] = float(read(status))
            except (KeyError, TypeError, ValueError):
                continue  # the status is missing so far, or an older version wrote it
        shown: dict[Any, float] = dict(values)
        if len(run.ranks) > MAX_RANKS:
            shown = {"min": min(values.values()), "max": max(values.values())} if values else {}
        for rank, value in shown.items():
            metric.add_metric([self.name, str(rank)], value)
        found: Metric = metric
        return found


_LABELS: Final = ("run", "rank")


def _counted(status: Mapping[str, Any], name: str) -> float:
    """Return a counter of a rank; it is 0 before the first is written."""
    return float(status.get(name, 0))


@dataclass(frozen=True)
class _Counts:
    all: int
    critical: int
    newest_step: int | None


def _count_incidents(path: Path) -> _Counts:
    """Count the incidents of a file that only grows; one that was critical once stays so, as a counter cannot fall."""
    steps: dict[Any, int] = {}
    critical: set[Any] = set()
    try:
        for _, line in read_lines(path, lambda *_: None):
            known = line.get("id")
            if not isinstance(known, int) or not isinstance(line.get("first_seen", 0), int):
                continue
            steps[known] = line.get("first_seen", 0)
            if line.get("severity") == "critical":
                critical.add(known)
    except (InputError, OSError):
        pass  # there is none so far
    return _Counts(len(steps), len(critical), steps[max(steps)] if steps else None)


def registry_of(root: Path, name: str | None = None, *, ending: bool = False) -> CollectorRegistry:
    """Return a registry that holds only the metrics of the run in `root`; see `RunCollector`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(root, name, ending=ending))
    return registry


def serve(root: Path, port: int, address: str, name: str | None = None) -> bool:
    """Serve the metrics in a thread; return False if another rank of this run and node does so already.

    Raises:
        OSError: when another program, or another run, has the port, or the port is not allowed.

    """
    try:
        start_http_server(port, address, registry_of(root, name))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        if not _serves(root, port, address):
            allowed = "allowed: another export.prometheus.port for each run of a node, or a textfile"
            raise OSError(errno.EADDRINUSE, f"port {port} is in use; {allowed}") from error
        return False
    return True


def _serves(root: Path, port: int, address: str) -> bool:
    """Return whether the program that has the port serves the metrics of this run."""
    from urllib.request import urlopen

    where = "127.0.0.1" if address in {"", "0.0.0.0"} else address  # noqa: S104 - every address of this machine
    try:
        with urlopen(f"http://{where}:{port}/metrics", timeout=2) as answer:
            return f'output_dir="{_escaped(str(root))}"' in answer.read(1 << 16).decode("utf-8", "replace")
    except (OSError, ValueError):
        return False


def _escaped(value: str) -> str:
    """Return a label's value as the text format has it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def write_textfile(root: Path, path: Path, name: str | None = None, *, ending: bool = False) -> None:
    """Write the metrics for the node exporter's textfile collector; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_to_textfile(str(path), registry_of(root, name, ending=ending))
