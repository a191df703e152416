"""A collector receives the run's metrics in its own format, and one that is not there harms nothing."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from recorded_runs import INCIDENT, running

import trainsentry
from trainsentry.exporters.files.json_files import append_lines
from trainsentry.exporters.metrics.open_telemetry import OpenTelemetry, Sending
from trainsentry.exporters.metrics.run_metrics import metrics_of_run
from trainsentry.monitor.errors import ConfigError


@contextmanager
def collector(status=200):
    """Run a collector; yields its address and the list of the requests that it has taken."""
    taken = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if status == 200:
                request = ExportMetricsServiceRequest()
                request.ParseFromString(body)
                taken.append((self.path, dict(self.headers), request))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/metrics", taken
    finally:
        server.shutdown()
        server.server_close()


def metrics_in(request):
    """Return {name: (is a counter, {labels: value})} of a request."""
    found = {}
    for scope in (scope for resource in request.resource_metrics for scope in resource.scope_metrics):
        for metric in scope.metrics:
            data = metric.sum if metric.HasField("sum") else metric.gauge
            points = {
                frozenset((a.key, a.value.string_value) for a in point.attributes): point.as_double
                for point in data.data_points
            }
            found[metric.name] = (metric.HasField("sum") and metric.sum.is_monotonic, points)
    return found


def test_a_collector_gets_every_metric_with_its_kind_and_labels(tmp_path):
    running(tmp_path, anomalies=3)
    with collector() as (address, taken):
        sending = Sending(OpenTelemetry(address, run="gpt"), tmp_path, first=True)
        sending.begin()
        sending.renew(now=True)
        append_lines(tmp_path / "incidents.jsonl", [INCIDENT])
        sending.renew()  # too early for the next
        sending.renew(now=True)
    (_, _, first), (_, _, second) = taken
    before, after = metrics_in(first), metrics_in(second)
    for metric in metrics_of_run(tmp_path, "gpt"):
        if metric.samples and metric.name != "last_incident_step":
            counts, points = before[f"trainsentry_{metric.name}"]
            assert counts == metric.counts
            assert {frozenset(zip(metric.labels, labels, strict=True)) for labels, _ in metric.samples} == set(points)
    run = frozenset({("run", "gpt")})
    assert (before["trainsentry_incidents"][1][run], after["trainsentry_incidents"][1][run]) == (0, 1)
    assert after["trainsentry_last_incident_step"][1][run] == 7
    assert after["trainsentry_anomalies"][1][frozenset({("run", "gpt"), ("rank", "1")})] == 3
    about = {a.key: a.value.string_value for a in second.resource_metrics[0].resource.attributes}
    assert (about["service.name"], about["service.instance.id"]) == ("trainsentry", "gpt")


def test_a_token_comes_from_the_environment_and_other_ranks_send_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer secret")
    running(tmp_path)
    with collector() as (address, taken):
        for first in (True, False):
            sending = Sending(OpenTelemetry(address), tmp_path, first=first)
            sending.begin()
            sending.renew(now=True)
    [(path, headers, _)] = taken
    assert (path, headers["authorization"]) == ("/v1/metrics", "Bearer secret")


def test_a_collector_that_refuses_is_an_error_that_the_recorder_knows(tmp_path):
    running(tmp_path)
    with collector(status=400) as (address, _):
        sending = Sending(OpenTelemetry(address), tmp_path, first=True)
        sending.begin()
        with pytest.raises(OSError, match="did not take the metrics"):
            sending.renew(now=True)


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://user:secret@host/v1/metrics", "ftp://host"])
def test_an_address_that_is_none_or_holds_a_secret_is_refused(endpoint):
    with pytest.raises(ConfigError, match=r"export\.opentelemetry\.endpoint"):
        trainsentry.TrainMonitor({"export": {"opentelemetry": {"endpoint": endpoint}}})


def test_a_training_sends_its_end_to_a_collector(tmp_path):
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with collector() as (address, taken):
        config = {"output_dir": str(tmp_path), "export": {"opentelemetry": {"endpoint": address}}}
        monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        monitor.close()
    found = metrics_in(taken[-1][2])
    states = {dict(labels)["state"]: value for labels, value in found["trainsentry_run_state"][1].items()}
    assert states["finished"] == 1
    assert list(found["trainsentry_step"][1].values()) == [11]


def test_a_collector_that_is_not_there_leaves_the_training_alone_and_is_told_of(tmp_path):
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    export = {"opentelemetry": {"endpoint": "http://127.0.0.1:9/v1/metrics"}}
    monitor = trainsentry.TrainMonitor({"output_dir": str(tmp_path), "export": export}).watch(model, optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    monitor.close()
    assert "opentelemetry" in (tmp_path / "rank0" / "status.json").read_text()
