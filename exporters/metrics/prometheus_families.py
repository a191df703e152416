"""The metrics of a run as Prometheus reads them: the endpoint that serves them, and the textfile that holds them."""

import errno
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trainsentry.exporters.metrics.prometheus_server import start_http_server
from trainsentry.exporters.metrics.run_metrics import metrics_of_run


class RunCollector:
    """Collects a run's metrics from its files at each request; see `metrics_of_run`."""

    def __init__(self, root: Path, name: str | None = None, *, ending: bool = False) -> None:
        self.root = root
        self.name = name
        self.ending = ending

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        for metric in metrics_of_run(self.root, self.name, ending=self.ending):
            kind = CounterMetricFamily if metric.counts else GaugeMetricFamily
            family = kind(f"trainsentry_{metric.name}", metric.meaning, labels=metric.labels)
            for labels, value in metric.samples:
                family.add_metric(list(labels), value)
            yield family


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
