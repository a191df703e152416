"""Metrics hold aggregates alone, alerts report each incident once; neither delays training or stores a secret."""

import json
import socket
import threading
import time
import urllib.request
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from tiny_models import flip_bit, mlp, train

import trainsentry
from trainsentry.exporters import webhook

SETTINGS = {"url_env": "HOOK", "token_env": "TOKEN", "style": "json", "timeout": 2.0, "retries": 3, "pause": 0.01}
INCIDENT = {
    "id": 1,
    "name": "fc.weight",
    "quantity": "gradient",
    "rank": 0,
    "severity": "critical",
    "summary": "It broke.",
}


@pytest.fixture
def hook():
    """A server that keeps posted messages, and answers with the next of `answers`."""
    got, answers = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((json.loads(body), self.headers.get("Authorization")))
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/secret-path", got, answers
    server.shutdown()
    server.server_close()


def test_a_delivery_is_tried_again_until_it_arrives(hook, monkeypatch):
    url, got, answers = hook
    monkeypatch.setenv("HOOK", url)
    monkeypatch.setenv("TOKEN", "abc")
    answers[:] = [500, 429]
    assert webhook.deliver(SETTINGS, INCIDENT) == (True, 3, "status 200")
    assert got[-1] == ({"type": "trainsentry.incident", "incident": INCIDENT}, "Bearer abc")


@pytest.mark.parametrize(("answers_given", "tries"), [([404], 1), ([500] * 9, 4)])
def test_a_delivery_that_cannot_arrive_ends(hook, monkeypatch, answers_given, tries):
    url, _, answers = hook
    answers[:] = answers_given
    monkeypatch.setenv("HOOK", url)
    arrived, tried, said = webhook.deliver(SETTINGS, INCIDENT)
    assert (arrived, tried) == (False, tries)
    assert said.startswith("status")


def test_an_address_that_nobody_answers_is_given_up_and_not_told(monkeypatch):
    monkeypatch.setenv("HOOK", "http://127.0.0.1:9/secret")
    arrived, tries, said = webhook.deliver(SETTINGS, INCIDENT)
    assert (arrived, tries) == (False, 4)
    assert "secret" not in said
    monkeypatch.setenv("HOOK", "file:///etc/passwd")
    assert webhook.deliver(SETTINGS, INCIDENT)[1] == 0


def test_a_port_whose_rank_has_ended_is_taken_over_by_another(tmp_path, monkeypatch):
    from trainsentry.exporters.metrics import prometheus, prometheus_families

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = []
    start = prometheus_families.start_http_server
    monkeypatch.setattr(prometheus_families, "start_http_server", lambda *a, **k: servers.append(start(*a, **k)[0]))
    monkeypatch.setattr(prometheus, "TAKE_OVER_SECONDS", 0.0)
    first, second = (prometheus.Metrics(prometheus.Prometheus(port), tmp_path, first=r == 0) for r in (0, 1))
    first.begin()
    second.begin()
    second.renew()
    assert len(servers) == 1, "the first one is still there"
    servers[0].shutdown()
    servers[0].server_close()
    second.renew()
    assert len(servers) == 2
    answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert "trainsentry_run_info" in answer
    servers[1].shutdown()
    servers[1].server_close()


def test_a_redirect_is_not_followed_with_the_token(hook, monkeypatch):
    url, got, answers = hook
    answers[:] = [302]
    monkeypatch.setenv("HOOK", url)
    monkeypatch.setenv("TOKEN", "abc")
    assert webhook.deliver(SETTINGS, INCIDENT) == (False, 1, "status 302")
    assert len(got) == 1


def test_a_port_that_something_else_has_is_told(out):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as taken:
        threading.Thread(target=taken.serve_forever, daemon=True).start()
        config = {"output_dir": str(out), "export": {"prometheus": {"port": taken.server_port}}}
        with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
            train(model, optimizer, 3, monitor)
        taken.shutdown()
    gaps = json.loads((out / "rank0" / "status.json").read_text())["gaps"]
    assert [gap["sink"] for gap in gaps] == ["prometheus"]
    assert "in use" in gaps[0]["reason"]


def test_chats_get_the_sentence():
    text = json.loads(webhook.payload_of(INCIDENT, "text"))["text"]
    assert "It broke." in text
    assert "fc.weight" in text


def broken_run(out, **export):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "export": export}).watch(model, optimizer)
    with monitor:
        train(model, optimizer, 30, monitor, before_step=lambda s: flip_bit(model[0].weight, 3) if s == 20 else None)
    return monitor


def test_an_incident_of_a_run_is_posted_once_and_the_address_stands_nowhere(out, hook, monkeypatch):
    url, got, _ = hook
    monkeypatch.setenv("TRAINSENTRY_WEBHOOK_URL", url)
    monitor = broken_run(out, webhook=True)
    deliveries = out / "deliveries.jsonl"
    end = time.monotonic() + 30
    while not deliveries.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert [json.loads(line)["arrived"] for line in deliveries.read_text().splitlines()] == [True]
    assert [body["incident"]["name"] for body, _ in got] == [monitor.incidents[0].name]
    assert not [f for f in out.rglob("*") if f.is_file() and b"secret-path" in f.read_bytes()]


def test_experiments_are_logged_by_weights_and_biases(out, monkeypatch):
    pytest.importorskip("wandb")
    monitor = broken_run(out, wandb={"project": "p", "mode": "offline"})
    [run] = (out / "wandb").glob("offline-run-*/*.wandb")
    content = run.read_bytes()
    assert b"layers.gradient/norm_of_all" in content
    assert monitor.incidents[0].name.encode() in content
    assert json.loads((out / "rank0" / "status.json").read_text())["exporters"]["wandb"] == "writing"


def test_experiments_are_logged_by_mlflow(out, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlflow").as_uri()
    monitor = broken_run(out, mlflow={"experiment": "e", "tracking_uri": uri})
    client = MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "layers.gradient/norm_of_all")] == list(
        range(30)
    )
    assert run.data.tags["trainsentry.first_suspect"].startswith(monitor.incidents[0].name)
    assert run.info.status == "FINISHED"


def test_a_log_that_hangs_or_fails_is_left_behind():
    from step_records import Records

    from trainsentry.exporters.experiment_log import ExperimentLog
    from trainsentry.monitor.recorder.sinks.gaps import Gaps
    from trainsentry.monitor.recorder.sinks.writers import JOB_BYTES, WriterThread

    records, gaps = Records(), Gaps()
    release, begun = threading.Event(), threading.Event()

    def begin():
        begun.set()
        release.wait()

    hangs = ExperimentLog("slow", records.table, begin)
    sink = WriterThread("slow", gaps, 60.0, patient=False, kept_bytes=5 * JOB_BYTES)
    for n in range(50):
        sink.submit(partial(hangs.write, records.step(n, {("fc.weight", "gradient"): 1.0})), n)
        sink.settle()  # never waits
    assert begun.wait(20)
    sink.close(0.1)
    release.set()
    assert [(g["sink"], g["first_step"], g["last_step"]) for g in gaps.to_json()] == [("slow", 0, 49)]

    def fails():
        raise ValueError("no key")

    broken = ExperimentLog("broken", records.table, fails)
    with pytest.raises(ValueError, match="no key"):
        broken.write(records.step(0, {("fc.weight", "gradient"): 1.0}))


def test_a_server_of_experiments_that_does_not_answer_is_asked_again():
    from step_records import Records

    from trainsentry.exporters.experiment_log import ExperimentLog

    class LibraryError(Exception):
        pass

    class Backend:
        def __init__(self):
            self.logged = []

        def log(self, step, numbers):
            self.logged.append(step)

        def finish(self):
            pass

    tries, backend = [], Backend()

    def begin():
        tries.append(1)
        if len(tries) == 1:
            try:
                raise ConnectionRefusedError("nobody listens")
            except OSError as error:
                raise LibraryError("cannot create a run") from error
        return backend

    log = ExperimentLog("log", Records().table, begin)
    record = Records().step(0, {})
    with pytest.raises(OSError, match="cannot create a run"):
        log.write(record)
    log.write(record)
    assert backend.logged == [0]


def test_the_endpoint_serves_while_the_run_goes_on(out):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as free:
        port = free.server_port
    config = {"output_dir": str(out), "export": {"prometheus": {"port": port}}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        train(model, optimizer, 5, monitor)
        monitor.flush()
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert f'trainsentry_step{{rank="0",run="{out}"}} 4.0' in page
    assert "fc" not in page
    assert json.loads((out / "rank0" / "status.json").read_text())["gaps"] == []


def test_the_textfile_is_renewed_a_last_time_when_the_run_ends_and_lacks_no_step(out, tmp_path, capsys):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    textfile = tmp_path / "metrics" / "run.prom"
    config = {"output_dir": str(out), "export": {"prometheus": {"port": None, "textfile": str(textfile)}}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        train(model, optimizer, 5, monitor)
    assert f'trainsentry_step{{rank="0",run="{out}"}} 4.0' in textfile.read_text()
    assert f'trainsentry_ranks_running{{run="{out}"}} 0.0' in textfile.read_text()
    assert f'trainsentry_run_state{{run="{out}",state="finished"}} 1.0' in textfile.read_text()
    assert "lacks" not in capsys.readouterr().err
