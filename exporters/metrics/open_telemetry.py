"""The OpenTelemetry exporter: rank 0 sends the run's metrics to a collector, over HTTP in the OTLP format."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.exporter import ExporterEntry, ExportPlace, Needed, setting
from trainsentry.exporters.metrics.run_metrics import RunMetric, metrics_of_run

TIMEOUT_SECONDS: Final = 5.0
"""Seconds of one sending with its tries; it has a thread of its own, and the end of a run waits for the last one."""


@dataclass(frozen=True)
class OpenTelemetry:
    """Metrics for an OpenTelemetry collector. Headers, such as a token, come from `OTEL_EXPORTER_OTLP_HEADERS`."""

    endpoint: str | None = setting(
        None,
        "Address of the collector. `null`: what `OTEL_EXPORTER_OTLP_ENDPOINT` says, or port 4318 of this host.",
        pattern=r"^https?://[^\s@]+$",
    )
    interval: float = setting(15.0, "Time between two sendings.", unit="seconds", ge=1, le=3600)
    run: str | None = setting(None, "Attribute `run` of every metric; the output directory's path by default.")


class Sending:
    """Sends the metrics of the run in `root`, read from its files; only the `first` rank does."""

    def __init__(self, settings: OpenTelemetry, root: Path, *, first: bool) -> None:
        self.settings = settings
        self.root = root
        self._first = first
        self._sent = 0.0
        self._present: dict[str, RunMetric] = {}
        self._made: set[str] = set()
        self._reader: Any = None
        self._meter: Any = None
        self._exporter: Any = None

    def begin(self) -> None:
        """Make the instruments' provider; nothing is sent before the first `renew`."""
        if not self._first:
            return
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource

        name = self.settings.run or str(self.root.absolute())
        self._reader = InMemoryMetricReader()
        about = Resource.create({"service.name": "trainsentry", "service.instance.id": name})
        provider = MeterProvider([self._reader], resource=about, shutdown_on_exit=False)
        self._meter = provider.get_meter("trainsentry")
        self._exporter = OTLPMetricExporter(endpoint=self.settings.endpoint, timeout=TIMEOUT_SECONDS)

    def renew(self, *, now: bool = False) -> None:
        """Send the present metrics if it is time.

        Raises:
            OSError: when the collector did not take them.

        """
        if not self._first or (not now and time.monotonic() - self._sent < self.settings.interval):
            return
        from opentelemetry.sdk.metrics.export import MetricExportResult

        self._sent = time.monotonic()
        self._present = {m.name: m for m in metrics_of_run(self.root, self.settings.run, ending=now)}
        self._make_instruments()
        if self._exporter.export(self._reader.get_metrics_data()) is not MetricExportResult.SUCCESS:
            raise OSError("the OpenTelemetry collector did not take the metrics")

    def _make_instruments(self) -> None:
        for name, metric in self._present.items():
            if name not in self._made:
                self._made.add(name)
                make = self._meter.create_observable_counter if metric.counts else self._meter.create_observable_gauge
                make(f"trainsentry_{name}", [lambda _, name=name: self._observed(name)], description=metric.meaning)

    def _observed(self, name: str) -> Iterator[Any]:
        from opentelemetry.metrics import Observation

        metric = self._present.get(name)
        if metric is not None:
            for labels, value in metric.samples:
                yield Observation(value, dict(zip(metric.labels, labels, strict=True)))


def sending_of(block: OpenTelemetry, place: ExportPlace) -> Sending:
    """Return what sends the metrics of the run."""
    return Sending(block, place.output_dir, first=place.rank == 0)


_EXTRA: Final = "needs OpenTelemetry's packages; allowed: pip install 'trainsentry[opentelemetry]'"

OPEN_TELEMETRY = ExporterEntry(
    "opentelemetry",
    sending_of,
    OpenTelemetry,
    at="status",
    needs=(Needed("opentelemetry.sdk", _EXTRA), Needed("opentelemetry.exporter.otlp.proto.http", _EXTRA)),
)
