"""Commands print names that others chose without any control sequence that a terminal obeys."""

import csv
import json
import os
import subprocess
import sys

import pytest
from recorded_runs import make_run
from step_records import Records
from typer.testing import CliRunner

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.monitor.cli.app import app

MARKUP = ("a[red]b[/red].weight", "[/bold]", "[x]", "layers[0].weight", "a:smile:b", "end\\")
CONTROL = "fc\x1b]0;owned\x9b2J\u202e.weight"
SHOWN = "fc\\x1b]0;owned\\x9b2J\\u202e.weight"
HALF = "fc\ud800.weight"


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    everything = result.output
    assert not {c for c in everything if (ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 or c == "\u202e"}
    return result.exit_code, everything.replace("\n", "")


def anomalies(folder, *names):
    (folder / "rank0").mkdir(parents=True)
    with (folder / "rank0" / "anomalies.jsonl").open("w") as file:
        for name in names:
            found = Anomaly(5, 0, 0, 0, name, "gradient", "nans", 1.0, 0.0, 100.0, "nonfinite", "nonfinite")
            file.write(json.dumps(found.to_json()) + "\n")
    return folder


def dump(folder, call, *, stack="File a.py", value=float("nan")):
    folder.mkdir(parents=True)
    facts = {"dtype": "torch.float32", "shape": [2], "Max": value, "Min": value, "Mean": value, "Norm": value}
    (folder / "dump.json").write_text(json.dumps({"data": {call: {"input_args": [], "output": [facts]}}}))
    (folder / "stack.json").write_text(json.dumps({call: [stack]}))
    return folder


@pytest.mark.parametrize("name", MARKUP)
def test_diagnose_shows_a_name_as_it_is(tmp_path, name):
    status, output = invoke("diagnose", anomalies(tmp_path, name))
    assert status == 1
    assert f" {name} (gradient, rank 0)" in output


@pytest.mark.parametrize("name", MARKUP)
def test_overflow_and_compare_show_a_call_as_it_is(tmp_path, name):
    call = f"Module.{name}.Linear.forward.0"
    one, other = dump(tmp_path / "a", call, stack=f"File {name}"), dump(tmp_path / "b", call, value=1.0)
    status, output = invoke("overflow", one)
    assert status == 1
    assert f"{call} on rank 0 made" in output
    assert f"File {name}" in output
    status, output = invoke("compare", one, other, "-o", tmp_path / "c.csv")
    assert status == 1
    assert f"rank 0, {call} (output.0)" in output
    assert f"  {call}  " in output  # a row of the table


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/x]", "[bold]"])
def test_directories_and_messages_are_shown_as_they_are(tmp_path, name):
    root = make_run(tmp_path / name.replace("/", "_"), steps=3, incident=False)
    with (root / "rank0" / "gradient_0-999.csv").open("a") as file:
        file.write(f"{name}\n")
    (root / "rank0" / "incidents.jsonl").write_text(f"{name}\n")
    for command in ("csv2tb", "report"):
        status, output = invoke(command, root)
        assert status == 0
        assert root.name in output
        assert "1 fields, expected" in output
    (tmp_path / "empty").mkdir()
    for command in ("diagnose", "overflow", "report", "csv2tb", "watch"):
        status, output = invoke(command, tmp_path / "empty" / name)
        assert status == 2
        assert name in output


def test_control_characters_and_halves_of_pairs_are_shown_as_their_escapes(tmp_path):
    _, output = invoke("diagnose", anomalies(tmp_path / "run", CONTROL, HALF))
    assert SHOWN in output
    assert "fc\\ud800.weight" in output
    for number, (name, shown) in enumerate(((CONTROL, SHOWN), (HALF, "fc\\ud800.weight"))):
        call, folder = f"Module.{name}.forward.0", tmp_path / str(number)
        one, other = dump(folder / "a", call, stack=name), dump(folder / "b", call, stack=name, value=1.0)
        for arguments in (("overflow", one), ("compare", one, other, "-o", tmp_path / "c.csv")):
            status, output = invoke(*arguments)
            assert status == 1
            assert shown in output


def test_watch_and_report_show_names_as_they_are(tmp_path):
    for number, name in enumerate((*MARKUP, CONTROL, HALF)):
        root = make_run(tmp_path / str(number), name=name)
        status = json.loads((root / "rank0" / "status.json").read_text())
        strange = {"state": name, "gaps": [{"exporter": name}], "failures": {name: 1}, "anomalies": name}
        (root / "rank0" / "status.json").write_text(json.dumps(status | strange))
        code, output = invoke("watch", root, "--once")
        assert code == 1
        shown = {CONTROL: SHOWN, HALF: "fc\\ud800.weight"}.get(name, name)
        assert f"the gradient of {shown} jumped" in output.replace("│", "").replace("  ", "")
        assert invoke("report", root)[0] == 0


@pytest.mark.parametrize("value", [[], 3, "x", None, 10**400, True, {"a": [1]}, [{"rank": "x"}]])
def test_watch_report_and_diagnose_take_files_of_wrong_types(tmp_path, value):
    root = make_run(tmp_path, steps=3)
    names = ("step", "cost", "gaps", "failures", "updated", "state", "rank", "suspects", "actions", "id", "score")
    wrong = json.dumps(dict.fromkeys((*names, "first_seen", "versions", "hosts", "configuration", "starts"), value))
    for position in ("run.json", "incidents.jsonl", "rank0/status.json", "rank0/anomalies.jsonl", "rank0/graph.json"):
        (root / position).write_text(wrong + "\n")
    for arguments in (("watch", root, "--once"), ("report", root), ("diagnose", root)):
        assert invoke(*arguments)[0] in {0, 1}


@pytest.mark.parametrize("command", ["watch", "report", "diagnose", "csv2tb"])
def test_a_run_of_pipes_and_devices_ends_every_command(tmp_path, command):
    root = make_run(tmp_path, steps=3, ranks=1)
    for position in ("run.json", "incidents.jsonl", "rank0/status.json", "rank0/anomalies.jsonl", "rank0/graph.json"):
        (root / position).unlink(missing_ok=True)
        os.mkfifo(root / position)
    (root / "rank0" / "update_0-999.csv").symlink_to("/dev/zero")
    assert invoke(command, root, *["--once"] * (command == "watch"))[0] in {0, 1}


def test_a_graph_that_cannot_be_read_is_named_and_the_anomalies_are_ranked(tmp_path):
    root = anomalies(tmp_path, "fc.weight")
    (root / "rank0" / "graph.json").write_text("[" * 100_000)
    status, output = invoke("diagnose", root)
    assert status == 1
    assert "graph.json: nested deeper" in output
    assert "fc.weight (gradient" in output


def test_the_table_of_a_comparison_is_a_new_file_where_its_name_is_a_link(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (tmp_path / "precious.txt").write_text("precious")
    (work / "comparison.csv").symlink_to(tmp_path / "precious.txt")
    one, other = dump(tmp_path / "a", HALF), dump(tmp_path / "b", HALF, value=1.0)
    assert invoke("compare", one, other)[0] == 1
    assert (tmp_path / "precious.txt").read_text() == "precious"
    assert not (work / "comparison.csv").is_symlink()
    with (work / "comparison.csv").open() as file:
        assert len(list(csv.reader(file))) == 2
    assert [path.name for path in work.iterdir()] == ["comparison.csv"]
    status, output = invoke("compare", one, other, "-o", tmp_path / "none" / "c.csv")
    assert status == 2
    assert "--output" in output


@pytest.mark.parametrize("steps", ["²", "1" * 5000, "١-٣", "1-", "-1", "5-3"])
def test_steps_that_are_none_are_bad_input(tmp_path, steps):
    status, output = invoke("diagnose", anomalies(tmp_path, "a"), f"--steps={steps}")
    assert status == 2
    assert "--steps" in output


def test_compare_names_what_it_left_out_of_two_runs(tmp_path):
    for name in "ab":
        records = Records()
        writer = CsvWriter(tmp_path / name / "rank0", records.table, STATISTICS)
        writer.write(records.step(0, {("fc.weight", "gradient"): 1.0}))
        writer.close()
    with (tmp_path / "b" / "rank0" / "gradient_0-999.csv").open("a") as file:
        file.write("odd\n")
    status, output = invoke("compare", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "c.csv")
    assert status == 0
    assert "gradient_0-999.csv:3: 1 fields, expected 14" in output


def test_a_terminal_of_few_characters_gets_escapes(tmp_path):
    folder = anomalies(tmp_path / "run", "größe.weight")
    command = [sys.executable, "-c", "from trainsentry.monitor.cli.app import main; main()", "diagnose", str(folder)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert (done.returncode, "gr\\xf6\\xdfe.weight" in done.stdout, done.stderr) == (1, True, "")
