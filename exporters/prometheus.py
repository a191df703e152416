"""Metrics of a run for Prometheus: aggregates and incidents, never a series for each parameter.

Each request reads the run's own files. So one endpoint serves all ranks of a run, and the training process counts
nothing.
"""

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import GaugeMetricFamily, Metric

from trainsentry.exporters.metrics_server import start_http_server
from trainsentry.exporters.run_reader import RecordedRun, last_scalars, read_run

MAX_RANKS: Final = 64
"""Up to this many ranks, each has a label of its own; larger runs show only minimum and maximum."""

SCALARS: Final = ("loss", "learning_rate", "grad_norm", "loss_scale")
"""Logged scalars that become metrics."""

_BY_RANK: Final = (
    ("step", "The last step that was recorded.", lambda s, _: s.get("step")),
    ("seconds_since_status", "Seconds since the rank renewed its status.", lambda s, now: now - s["updated"]),
    ("anomalies", "Abnormal values found.", lambda s, _: s.get("anomalies")),
    ("overflow_steps", "Steps with an overflow.", lambda s, _: s.get("overflow_steps")),
    ("skipped_steps", "Steps that the loss scaler skipped.", lambda s, _: s.get("skipped_steps")),
    ("overhead_ratio", "The monitor's share of the training's time.", lambda s, _: s["cost"]["recent_share"]),
    ("troubles", "Parts of the monitor that have failed.", lambda s, _: len(s["gaps"]) + len(s["failures"])),
)


class RunCollector:
    """Collects a run's metrics from the files in its directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        run, now = read_run(self.root), time.time()
        info = GaugeMetricFamily("trainsentry_run_info", "The run.", labels=("output_dir",))
        info.add_metric([str(self.root)], 1)
        yield info
        yield from _of_ranks(run, now)
        incidents = GaugeMetricFamily("trainsentry_incidents", "Incidents so far.", labels=("severity", "kind"))
        counts: dict[tuple[str, str], int] = {}
        for incident in run.incidents:
            key = (str(incident.get("severity")), str(incident.get("kind")))
            counts[key] = counts.get(key, 0) + 1
        for labels, count in counts.items():
            incidents.add_metric(labels, count)
        yield incidents
        running = sum(status.get("state") == "running" for status in run.ranks.values())
        yield GaugeMetricFamily("trainsentry_ranks_running", "Ranks at work.", value=running)
        first = next(iter(run.ranks), 0)
        for name, points in last_scalars(self.root / f"rank{first}", 1 << 14).items():
            if name in SCALARS and points:
                yield GaugeMetricFamily(f"trainsentry_{name}", f"The newest {name}.", value=points[-1][1])


def _of_ranks(run: RecordedRun, now: float) -> Iterator[Metric]:
    for name, text, read in _BY_RANK:
        values: dict[int, float] = {}
        for rank, status in run.ranks.items():
            try:
                values[rank] = float(read(status, now))
            except (KeyError, TypeError, ValueError):
                continue  # the status is missing so far, or an older version wrote it
        few = len(run.ranks) <= MAX_RANKS
        metric = GaugeMetricFamily(f"trainsentry_{name}", text, labels=("rank",) if few else ("extreme",))
        shown: dict[Any, float] = dict(values)
        if not few:
            shown = {"min": min(values.values()), "max": max(values.values())} if values else {}
        for label, value in shown.items():
            metric.add_metric([str(label)], value)
        yield metric


def registry_of(root: Path) -> CollectorRegistry:
    """Return a registry that holds only the metrics of the run in `root`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(root))
    return registry


def serve(root: Path, port: int, address: str) -> bool:
    """Serve the metrics in a thread; return False if another rank of this run and node does so already.

    Raises:
        OSError: when another program has the port, or the port is not allowed.

    """
    try:
        start_http_server(port, address, registry_of(root))
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _serves(root, port, address):
            raise
        return False
    return True


def _serves(root: Path, port: int, address: str) -> bool:
    """Return whether the program that has the port serves the metrics of this run."""
    from urllib.request import urlopen

    where = "127.0.0.1" if address in {"", "0.0.0.0"} else address  # noqa: S104 - every address of this machine
    try:
        with urlopen(f"http://{where}:{port}/metrics", timeout=2) as answer:
            return f'output_dir="{root}"' in answer.read(1 << 16).decode("utf-8", "replace")
    except (OSError, ValueError):
        return False


def write_textfile(root: Path, path: Path) -> None:
    """Write the metrics for the node exporter's textfile collector; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_to_textfile(str(path), registry_of(root))
