"""Prometheus' own checker finds nothing in the metrics; a real server that scrapes a run sees its first incident."""

import subprocess
import time
import urllib.request
from pathlib import Path

import torch
from prometheus_server import PROMTOOL, free_port, needs_prometheus, needs_promtool, scraping
from recorded_runs import make_run
from watched import make

from trainsentry.exporters.files.json_files import replace_json
from trainsentry.exporters.metrics.prometheus import Metrics, Prometheus

RULES = Path(__file__).parents[3] / "exporters" / "grafana" / "alerts.yml"

PAUSE = 0.05
"""Seconds between two steps: scrapes are a second apart, and the run must not grow old between two of them."""


def checked(text):
    """Return what promtool says about metrics."""
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@needs_promtool
def test_promtool_finds_nothing_in_the_textfile_and_in_what_the_port_serves(tmp_path):
    root = make_run(tmp_path / 'a "run" of ours\\', ranks=2)
    logged = ("learning_rate", "grad_norm", "loss_scale")
    lines = ["name,step,micro_step,value", *(f"{name},50,0,nan" for name in logged)]
    (root / "rank0" / "scalars_50-999.csv").write_text("\n".join(lines) + "\n")
    status = {"state": "running", "step": 50, "updated": 1.0, "lag_steps": 0, "lag_seconds": 0.0, "failures": {}}
    replace_json(root / "rank0" / "status.json", status | {"cost": {"recent_share": 0.01, "step_seconds": 0.25}})
    replace_json(root / "run.json", {"start_time": 1.0})
    port = free_port()
    metrics = Metrics(Prometheus(port=port, textfile=str(tmp_path / "run.prom")), root, first=True)
    metrics.begin()
    metrics.renew(now=True)
    served = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    for text in (served, (tmp_path / "run.prom").read_text()):
        assert text.count("# TYPE") == 23
        assert checked(text) == (0, "")
    assert checked(served.replace("trainsentry_step{", "trainsentry_step{{"))[0] != 0


def train(model, optimizer, monitor, *, broken=False):
    """Take one step; a broken one has a gradient that is not finite."""
    time.sleep(PAUSE)
    loss = (model(torch.randn(16, 8)) - torch.randn(16, 4)).square().mean()
    loss.backward()
    if broken:
        model[0].weight.grad[0, 0] = float("nan")
    monitor.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()


@needs_prometheus
def test_a_real_server_sees_the_first_incident_of_a_live_run_as_an_increase_and_fires_the_alert(tmp_path):
    port = free_port()
    parts = make(tmp_path / "out", export={"prometheus": {"port": port, "run": "gpt-7"}})
    with scraping(tmp_path / "server", port, RULES) as server:
        [(labels, value)] = server.until("trainsentry_incidents_total", lambda: train(*parts))
        assert (labels["run"], value) == ("gpt-7", 0.0)
        assert not server.ask("increase(trainsentry_incidents_total[5m]) >= 1")
        assert not server.ask('ALERTS{alertstate="firing"}')
        train(*parts, broken=True)
        [(labels, _)] = server.until('increase(trainsentry_incidents_total{run="gpt-7"}[5m]) >= 1')
        assert labels["run"] == "gpt-7"
        server.until('ALERTS{alertname="TrainingIncident",alertstate="firing",run="gpt-7"}')
        server.until('ALERTS{alertname="TrainingCriticalIncident",alertstate="firing",run="gpt-7"}')
    parts[2].close()
