"""msprobe's rules find what msprobe finds, its file has its form, and its ranking puts the same alerts first."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainsentry.collectors.series import Layout
from trainsentry.exporters.msprobe.alerts import MsprobeAlerts
from trainsentry.exporters.msprobe.recorded_alerts import alert_files, read_alerts
from trainsentry.exporters.msprobe.rows import MsprobeRow
from trainsentry.monitor.cli import anomaly_analysis
from trainsentry.monitor.cli.app import app

DATA = Path(__file__).parents[2] / "data" / "msprobe_files" / "anomaly_detected"


def row(norm, nans=0.0, name="fc.weight"):
    """Return a row of gradients with this norm; its mean is the norm with its sign."""
    numbers = (norm, norm, norm, abs(norm), nans, 0.0, 0.0, math.nan)
    return MsprobeRow("grad_reduced", "post_grad", 0, name, None, numbers, Layout((4,), "float32", 4))


def alerts_of(tmp_path, values, **rules):
    alerts = MsprobeAlerts(
        tmp_path, 0, ("norm", "max", "nans"), **{"turbulence": None, "nan": False, "size": None, **rules}
    )
    for step, value in enumerate(values):
        alerts.judge(step, [value if isinstance(value, MsprobeRow) else row(value)])
    alerts.write()
    return json.loads(alerts.path.read_text())


def test_turbulence_is_a_value_above_its_average_times_one_plus_the_threshold(tmp_path):
    found = alerts_of(tmp_path, [1.0, 1.4, 1.6, 1.4], turbulence=0.5)
    assert [a["step"] for a in found.values()] == [2]  # 1.6 > 1.004 · 1.5 > 1.4
    [(key, alert)] = found.items()
    assert key == "0:fc.weight/rank0/post_grad_step_2_call_0"
    golden = next(iter(json.loads((DATA / "rank0" / "anomaly.json").read_text()).values()))
    assert list(alert) == list(golden)
    assert (
        "Rule AnomalyTurbulence reports anomaly signal in ('0:fc.weight/rank0/post_grad', 'norm')" in alert["message"]
    )


def test_a_rule_still_works_after_a_nan(tmp_path):
    found = alerts_of(tmp_path, [1.0, row(1.0, nans=3.0), 9.0], turbulence=0.5)
    assert [a["step"] for a in found.values()] == [2]


@pytest.mark.parametrize(("value", "found"), [(row(1.0, nans=1.0), 1), (row(1e9), 0), (row(1e11), 1)])
def test_nan_and_size(tmp_path, value, found):
    assert len(alerts_of(tmp_path, [value], nan=True, size=1e10)) == found


def test_the_ranking_of_msprobes_file_is_msprobes(tmp_path):
    wanted = json.loads((DATA / "anomaly_analyse.json").read_text())
    done = CliRunner().invoke(app, ["diagnose", str(DATA), "-k", "8", "-o", str(tmp_path)])
    assert done.exit_code == 1, done.output
    written = json.loads((tmp_path / "anomaly_analyse.json").read_text())
    assert list(written.items()) == list(wanted.items())


def test_msprobes_options_choose_steps(tmp_path):
    import typer

    command = typer.Typer()
    command.command()(anomaly_analysis.analyse_command)
    done = CliRunner().invoke(command, ["-d", str(DATA), "-o", str(tmp_path), "-k", "3", "-s", "[1]"])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "anomaly_analyse.json").read_text())
    assert {a["step"] for a in written.values()} == {1}
    assert len(written) == 3


def test_the_earliest_place_in_the_pass_comes_first(tmp_path):
    def alert(tag, **members):
        return {"step": 3, "micro_step": 0, "rank": 0, "tag_name": f"0:fc/rank0/{tag}", "call_id": 1, **members}

    in_order = {
        "last step's weights": alert("param_origin", step=2),
        "first stage, forward": alert("actv", pp_stage=0),
        "second stage, forward": alert("actv", pp_stage=1),
        "second stage, backward": alert("post_grad", pp_stage=1),
        "first stage, backward": alert("acc_grad", pp_stage=0),
        "state": alert("exp_avg", call_id=0),
        "weights": alert("param_updated", call_id=2),
    }
    (tmp_path / "anomaly.json").write_text(json.dumps(dict(reversed(in_order.items()))))
    found = read_alerts(alert_files(tmp_path), lambda *problem: pytest.fail(str(problem)))
    assert [a.key for a in found] == list(in_order)


def test_an_entry_that_is_no_alert_is_reported_and_the_rest_is_kept(tmp_path):
    path = tmp_path / "rank3" / "anomaly.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"a": {"step": "x"}, "b": {"step": 2, "tag_name": "0:fc/rank3/actv", "rank": 3}}))
    problems = []
    found = read_alerts(alert_files(tmp_path), lambda *problem: problems.append(problem))
    assert [alert.key for alert in found] == ["b"]
    assert [(p[0], p[1]) for p in problems] == [(path, 0)]
