"""The dashboard and the alert rules name metrics that exist, with labels that they have; promtool finds them right."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_server import PROMTOOL, needs_promtool
from recorded_runs import make_run

from trainsentry.exporters.files.json_files import replace_json
from trainsentry.exporters.metrics.prometheus_families import registry_of

GRAFANA = Path(__file__).parents[3] / "exporters" / "grafana"
RULES = GRAFANA / "alerts.yml"
DASHBOARD = json.loads((GRAFANA / "dashboard.json").read_text())
NAME = re.compile(r"\btrainsentry_\w+")
OF_PROMETHEUS = {"instance", "job"}
"""Labels that the server adds."""


def rules():
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def panel_expressions():
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.fixture
def exported(tmp_path):
    """The labels of every exported metric, by the metric's name."""
    root = make_run(tmp_path, ranks=1)
    logged = ("learning_rate", "grad_norm", "loss_scale")
    lines = ["name,step,micro_step,value", *(f"{name},50,0,1.0" for name in logged)]
    (root / "rank0" / "scalars_50-999.csv").write_text("\n".join(lines) + "\n")
    status = {"state": "running", "step": 50, "updated": 1.0, "lag_steps": 0, "lag_seconds": 0.0, "failures": {}}
    status["cost"] = {"recent_share": 0.01, "step_seconds": 0.25}
    replace_json(root / "rank0" / "status.json", status)
    replace_json(root / "run.json", {"start_time": 1.0})
    return {sample.name: set(sample.labels) for family in registry_of(root).collect() for sample in family.samples}


def test_every_metric_of_the_dashboard_and_of_the_rules_is_exported(exported):
    named = {
        name for text in [*panel_expressions(), *(rule["expr"] for rule in rules())] for name in NAME.findall(text)
    }
    assert named
    assert named <= set(exported)


def test_every_label_that_a_text_shows_belongs_to_the_metrics_it_speaks_of(exported):
    for rule in rules():
        shown = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule)))
        first = NAME.search(rule["expr"])[0]
        assert shown <= exported[first] | OF_PROMETHEUS, rule["alert"]
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= exported[NAME.search(target["expr"])[0]] | OF_PROMETHEUS, panel["title"]


def test_panels_lie_beside_one_another_and_follow_the_chosen_run():
    cells = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & covered, panel["title"]
        assert max(x for x, _ in covered) < 24
        cells |= covered
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all('run=~"$run"' in expression for expression in panel_expressions())


def test_every_rule_has_what_a_page_at_night_needs():
    for rule in rules():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert "$labels.run" in rule["annotations"]["summary"]


SCENES = """
rule_files: [RULES]
evaluation_interval: 30s
tests:
  - interval: 30s
    input_series:
      - series: 'trainsentry_incidents_total{run="a"}'
        values: '0x9 1x9'
      - series: 'trainsentry_incidents_total{run="born with one"}'
        values: '1x20'
      - series: 'trainsentry_incidents_total{run="clean"}'
        values: '0x20'
      - series: 'trainsentry_run_state{run="a",state="crashed"}'
        values: '0x9 1x9'
      - series: 'trainsentry_status_timestamp_seconds{run="a",rank="0"}'
        values: '0+30x20'
      - series: 'trainsentry_run_state{run="hangs",state="running"}'
        values: '1x40'
      - series: 'trainsentry_status_timestamp_seconds{run="hangs",rank="0"}'
        values: '0x20'
      - series: 'trainsentry_run_state{run="gone",state="running"}'
        values: '1x9 stale'
      - series: 'trainsentry_run_state{run="finished",state="running"}'
        values: '1x8 0 stale'
      - series: 'trainsentry_loss{run="a"}'
        values: '1 1 1 1 1 1 1 1 1 1 NaN NaN NaN'
    promql_expr_test:
      - {expr: 'increase(trainsentry_incidents_total{run="a"}[5m]) > 0', eval_time: 4m, exp_samples: []}
      - expr: 'increase(trainsentry_incidents_total{run="a"}[5m]) > bool 0'
        eval_time: 6m
        exp_samples: [{labels: '{run="a"}', value: 1}]
    alert_rule_test:
      - {eval_time: 4m, alertname: TrainingCrashed}
      - {eval_time: 6m, alertname: TrainingCrashed, exp_alerts: [EXPECTED_CRASH]}
      - {eval_time: 6m, alertname: TrainingIncident, exp_alerts: [EXPECTED_INCIDENT]}
      - {eval_time: 6m, alertname: TrainingSilent, exp_alerts: [EXPECTED_SILENCE]}
      - {eval_time: 7m, alertname: TrainingGone, exp_alerts: [EXPECTED_GONE]}
      - {eval_time: 20m, alertname: TrainingGone}
      - {eval_time: 6m, alertname: TrainingLossNotFinite, exp_alerts: [EXPECTED_LOSS]}
"""


@needs_promtool
def test_promtool_finds_the_rules_right_and_sees_the_first_incident(tmp_path):
    def alert(severity, summary, description=None, **labels):
        annotations = {"summary": summary} | ({"description": description} if description else {})
        return json.dumps({"exp_labels": {"severity": severity, **labels}, "exp_annotations": annotations})

    subprocess.run([PROMTOOL, "check", "rules", RULES], check=True)
    told = "The first culprit: trainsentry report a --format markdown"
    gone = "gone: the metrics of a running training have gone: it has ended, or its node has"
    how = "How it ended: trainsentry watch gone --once"
    scenes = (
        SCENES.replace("RULES", str(RULES))
        .replace("EXPECTED_CRASH", alert("critical", "a: the training crashed or was killed", run="a", state="crashed"))
        .replace("EXPECTED_INCIDENT", alert("warning", "a: a new incident", told, run="a"))
        .replace("EXPECTED_SILENCE", alert("critical", "hangs: a rank has said nothing for 6m 0s", run="hangs"))
        .replace("EXPECTED_GONE", alert("warning", gone, how, run="gone", state="running"))
        .replace("EXPECTED_LOSS", alert("critical", "a: the loss is not finite", run="a"))
    )
    (tmp_path / "scenes.yml").write_text(scenes)
    done = subprocess.run([PROMTOOL, "test", "rules", tmp_path / "scenes.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
