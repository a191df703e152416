"""The live view reads files alone, says what matters, and ends with the run."""

import json
import os
import re
import select
import subprocess
import sys
import time

import pytest
from recorded_runs import CULPRIT, make_run
from typer.testing import CliRunner

from trainsentry.exporters.files.json_files import append_lines, replace_json
from trainsentry.exporters.run_reader import last_scalars, read_run, tail
from trainsentry.monitor.cli.app import app

SUMMARY = f"At step 30 on rank 0: the gradient of {CULPRIT} jumped."

runner = CliRunner(env={"COLUMNS": "140"})


def test_a_run_that_is_over_is_shown_with_its_incident(tmp_path):
    make_run(tmp_path)
    result = runner.invoke(app, ["watch", str(tmp_path)])
    assert result.exit_code == 1
    for text in (CULPRIT, "1 incident\n", "step 39", "2 ranks", "The run has finished.", "loss", "worst series"):
        assert text in result.output


def test_a_run_that_is_well_says_so(tmp_path):
    make_run(tmp_path, incident=False)
    result = runner.invoke(app, ["watch", str(tmp_path), "--once"])
    assert (result.exit_code, "No incident." in result.output) == (0, True)


def test_a_silent_rank_and_trouble_of_the_monitor_are_seen(tmp_path):
    make_run(tmp_path, incident=False)
    path = tmp_path / "rank1" / "status.json"
    status = json.loads(path.read_text()) | {
        "state": "running",
        "updated": 0,
        "gaps": [{"sink": "csv", "first_step": 3, "last_step": 9, "reason": "full"}],
    }
    path.write_text(json.dumps(status))
    output = runner.invoke(app, ["watch", str(tmp_path), "--once"]).output
    assert "csv" in output
    assert " h " in output  # not seen for hours


def change(root, rank=0, **status):
    path = root / f"rank{rank}" / "status.json"
    replace_json(path, json.loads(path.read_text()) | status)


def again(root, **change):
    """Append an incident like the first one."""
    line = json.loads((root / "incidents.jsonl").read_text().splitlines()[0])
    append_lines(root / "incidents.jsonl", [line | change])


def shown(root, width=140):
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, ["watch", str(root), "--once"])
    assert result.exit_code == 1, result.output
    return result.output


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_of_any_width_is_used_and_no_number_is_cut(tmp_path, width):
    root = make_run(tmp_path, name="encoder.layers.3.mlp.up_projection.weight")
    line = {"step": 31, "name": "encoder.layers.3.mlp.up_projection.weight", "quantity": "activation_grad_output"}
    numbers = {"value": 1.2345e38, "expected": 1.8447e-19, "score": 70.0, "rank": 0, "kind": "overflow"}
    append_lines(root / "rank0" / "anomalies.jsonl", [line | numbers])
    lines = shown(root, width).splitlines()
    assert max(map(len, lines)) <= width
    assert "1.2345e+38" in "\n".join(lines)
    curve = next(line for line in lines if line.startswith("loss"))
    assert width - 4 <= len(curve.rstrip()) <= width
    assert not [line for line in lines if re.search(r"\de\+?…|\de$", line)]


def test_incidents_of_one_culprit_are_one_entry(tmp_path):
    root = make_run(tmp_path)
    for n in range(2, 6):
        again(root, id=n, first_seen=30 + n, last_seen=30 + n, score=1.0)
    output = shown(root)
    assert "5 incidents of 1 first suspect\n" in output
    assert output.count(f"{CULPRIT} (gradient, rank 0)") == 1
    assert "steps 30 to 35" in output
    assert "5 times" in output


def test_lag_silence_and_cost_are_said_in_words(tmp_path):
    root = make_run(tmp_path)
    cost = {"share": 0.183, "recent_share": 0.42, "step_seconds": 0.5}
    change(root, 0, state="running", updated=time.time(), lag_steps=480, lag_seconds=33.0, cost=cost)
    change(root, 1, state="running", updated=time.time() - 600)
    output = shown(root)
    assert "The recorder is 480 steps (33 s) behind the training: incidents come late." in output
    assert "Rank 1 has said nothing for 10 min." in output
    assert re.search(r"cost now +in all", output)
    assert re.search(r"42.0 % +18.3 %", output)
    assert "500 ms a step" in output


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"state": "closed", "ended": "stopped", "why": "enough"}, "The run was stopped: enough."),
        ({"state": "closed", "ended": "stopped", "why": "It was enough."}, "The run was stopped: It was enough.\n"),
        ({"state": "closed", "ended": "stopped", "why": SUMMARY}, "The run was stopped by incident 1.\n"),
        ({"state": "trainer gone"}, "The run crashed or was killed."),
        (
            {"state": "closed", "ended": "crashed", "why": "ValueError: x"},
            "The run crashed or was killed: ValueError: x.",
        ),
    ],
)
def test_how_a_run_ended_is_said_in_words(tmp_path, status, said):
    root = make_run(tmp_path, ranks=1)
    change(root, **status)
    assert said in shown(root)


def read_until(terminal, wanted, seen=""):
    """Return what a terminal showed up to a text; fail after a minute without it."""
    end = time.monotonic() + 60
    while not re.search(wanted, seen):
        assert time.monotonic() < end, seen
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 1 << 16).decode("utf-8", "replace")
    return seen


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals of this kind here")
def test_keys_choose_open_and_leave_an_incident(tmp_path):
    root = make_run(tmp_path)
    again(root, id=2, name="layers.5.norm.weight", summary="The norm weight drifts away.", score=1.0)
    for rank in (0, 1):
        change(root, rank, state="running", updated=time.time())
    ours, theirs = os.openpty()
    code = "from trainsentry.monitor.cli.app import main; main()"
    command = [sys.executable, "-c", code, "watch", str(root), "--every", "0.2"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    try:
        read_until(ours, r"enter.*: open")
        os.write(ours, b"\x1b[B")
        read_until(ours, "The norm weight drifts away")
        os.write(ours, b"\r")
        read_until(ours, "1\\. .*(?s:.)*another incident")
        os.write(ours, b"qq")
        read_until(ours, "2 incidents")
        assert process.wait(60) == 1
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)


def test_markup_in_names_is_shown_as_it_is(tmp_path):
    make_run(tmp_path, name="[red]layer[/red]")
    assert "[red]layer[/red]" in runner.invoke(app, ["watch", str(tmp_path), "--once"]).output


def test_what_is_no_run_is_bad_input(tmp_path):
    assert runner.invoke(app, ["watch", str(tmp_path)]).exit_code == 2
    assert runner.invoke(app, ["watch", str(tmp_path / "missing")]).exit_code == 2


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert tail(path) == ['{"a": 1}', '{"a": 2}']
    assert tail(path, 14) == ['{"a": 2}']
    assert tail(tmp_path / "none") == []


def test_scalars_after_a_restart_are_the_newest(tmp_path):
    (tmp_path / "scalars_0-999.csv").write_text("name,step,micro_step,value\nloss,4,0,1.0\nloss,5,0,1.0\nloss,6,0,1.\n")
    (tmp_path / "scalars_5-999.r1.csv").write_text("name,step,micro_step,value\nloss,5,0,2.0\n")
    assert last_scalars(tmp_path)["loss"] == [(4, 1.0), (5, 2.0), (6, 1.0)]
    assert read_run(tmp_path).ranks == {}
