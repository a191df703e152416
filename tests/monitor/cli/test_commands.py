"""Commands print what their help promises and end with the right exit code."""

import json
import re

import pytest
import torch
from tiny_models import flip_bit, mlp, train
from typer.testing import CliRunner

import trainsentry
from trainsentry.monitor.cli.app import app


def invoke(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture(scope="module")
def broken_run(tmp_path_factory):
    """A recorded run in which a weight broke at step 13."""
    out = tmp_path_factory.mktemp("run") / "monitor_output"
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer) as monitor:
        train(model, optimizer, 25, monitor, before_step=lambda s: flip_bit(model[2].weight, 3) if s == 13 else None)
    return out


def test_diagnose_names_the_first_suspect_and_exits_with_1(broken_run):
    result = invoke("diagnose", broken_run, "-k", 2)
    assert result.exit_code == 1
    assert "1. 2.weight (parameter, rank 0)" in result.output
    assert "3." not in [line.split()[0] for line in result.output.splitlines() if line.strip()]


def test_diagnose_begins_with_a_count_and_wraps_nothing_in_a_pipe(broken_run):
    lines = CliRunner(env={"COLUMNS": "60"}).invoke(app, ["diagnose", str(broken_run)]).output.splitlines()
    assert re.fullmatch(r"1 incident|\d+ incidents, \d+ critical", lines[0])
    assert max(map(len, lines)) > 100
    assert all(re.match(r"incident \d+( \(the worst\))?, |  ?\d+\. |     ", line) for line in lines[1:])


def test_diagnose_wraps_with_an_indent_on_a_terminal(broken_run, monkeypatch):
    from trainsentry.monitor.cli.console import out

    monkeypatch.setattr(out, "_force_terminal", True)
    monkeypatch.setattr(out, "_width", 60)
    monkeypatch.setattr(out, "_height", 40)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", invoke("diagnose", broken_run).output).splitlines()
    first = next(i for i, line in enumerate(lines) if "  1. 2.weight" in line)
    assert max(map(len, lines)) <= 60
    assert all(line.startswith(("     ", "  2. ")) for line in lines[first + 1 : first + 4])


def test_diagnose_gives_the_same_first_suspect_from_the_tables_alone(broken_run, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(broken_run, copy)
    (copy / "rank0" / "anomalies.jsonl").unlink()
    result = invoke("diagnose", copy)
    assert result.exit_code == 1
    assert "1. 2.weight (parameter, rank 0)" in result.output
    assert invoke("rank", copy / "rank0").exit_code == 1


def test_diagnose_anew_judges_the_tables_again_and_keeps_what_only_ranks_compared_show(broken_run, tmp_path):
    import json
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(broken_run, copy)
    path = copy / "rank0" / "anomalies.jsonl"
    found = json.loads(path.read_text().splitlines()[0])
    outdated = {**found, "step": 5, "name": "long.gone", "detector": "an older version's"}
    compared = {**outdated, "step": 3, "rank": 7, "name": "0.weight", "quantity": "parameter"}
    compared.update(detector="replicas", kind="replica_mismatch")
    path.write_text("".join(json.dumps(line) + "\n" for line in (outdated, compared)))
    assert "long.gone (" in invoke("diagnose", copy).output
    again = invoke("diagnose", copy, "--anew").output
    assert "long.gone (" not in again
    assert "1. 0.weight (parameter, rank 7)" in again
    assert "2.weight (parameter, rank 0)" in again


def test_diagnose_of_healthy_steps_exits_with_0(broken_run):
    result = invoke("diagnose", broken_run, "--steps", "0-9")
    assert result.exit_code == 0
    assert "nothing abnormal" in result.output


@pytest.mark.parametrize("command", ["diagnose", "csv2tb"])
def test_a_directory_that_is_not_ours_is_bad_input(tmp_path, command):
    result = invoke(command, tmp_path)
    assert result.exit_code == 2
    assert "no output of trainsentry" in result.output or "no output of trainsentry" in result.stderr
    assert invoke(command, tmp_path / "missing").exit_code == 2


def test_bad_steps_are_bad_input(broken_run):
    for text in ("a-b", "5-", "-"):
        assert invoke("diagnose", broken_run, "--steps", text).exit_code == 2


def test_malformed_lines_are_named_with_file_and_line(broken_run, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(broken_run, copy)
    path = copy / "rank0" / "anomalies.jsonl"
    path.write_text('{"step": 1}\nnonsense\n' + path.read_text())
    result = invoke("diagnose", copy)
    assert result.exit_code == 1
    assert f"{path}:1:" in result.stderr.replace("\n", "")
    assert f"{path}:2:" in result.stderr.replace("\n", "")


def test_csv2tb_converts_and_says_how_to_open_it(broken_run, tmp_path):
    result = invoke("csv2tb", broken_run, tmp_path / "tb", "--quantity", "gradient")
    assert result.exit_code == 0
    assert list((tmp_path / "tb" / "rank0").glob("events.out.tfevents.*"))
    assert "tensorboard --logdir" in result.output


@pytest.mark.parametrize("jobs", [1, 2])
def test_csv2tb_counts_the_bytes_of_the_tables_that_it_was_asked_for(broken_run, tmp_path, jobs):
    from trainsentry.exporters.convert.csv2tb import csv2tb

    asked = sum(path.stat().st_size for path in broken_run.glob("rank0/gradient_*.csv"))
    for _ in range(2):  # the second time it is up to date
        totals, read = [], []
        csv2tb(
            broken_run,
            tmp_path,
            quantities=["gradient"],
            jobs=jobs,
            begin=totals.append,
            progress=lambda _, n, read=read: read.append(n),
        )
        assert (totals, sum(read)) == ([asked], asked)


def test_csv2tb_that_is_stopped_says_how_to_go_on_and_keeps_what_is_done(broken_run, tmp_path, monkeypatch):
    from trainsentry.exporters.convert import csv2tb

    convert, done = csv2tb.convert_table, []

    def stopped_at_the_third(*arguments):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return convert(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(csv2tb, "convert_table", stopped_at_the_third)
        result = invoke("csv2tb", broken_run, tmp_path)
    assert result.exit_code == 130
    assert "the same command goes on" in result.output
    assert "2 tables already up to date" in invoke("csv2tb", broken_run, tmp_path).output


def test_config_check_prints_the_whole_configuration_or_the_mistake(tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.json"
    good.write_text("collect: {gradients: {every: 3}}\n")
    bad.write_text('{"colect": {}}')
    result = invoke("config", "check", good)
    assert result.exit_code == 0
    assert json.loads(result.output)["collect"]["gradients"]["every"] == 3
    result = invoke("config", "check", bad)
    assert result.exit_code == 2
    assert "'collect'" in result.stderr


def test_config_schema_is_json():
    result = invoke("config", "schema")
    assert result.exit_code == 0
    assert "on_incident" in json.loads(result.output)["properties"]


@pytest.mark.parametrize("command", [["demo"], ["diagnose"], ["csv2tb"], ["config", "check"], ["config", "schema"]])
def test_help_has_an_example(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Example: trainsentry" in " ".join(result.output.split())


def test_steps_that_end_before_they_begin_and_steps_without_rows_are_bad_input(broken_run, tmp_path):
    assert invoke("diagnose", broken_run, "--steps", "9-5").exit_code == 2
    assert invoke("csv2tb", broken_run, tmp_path / "tb", "--steps", "5-3").exit_code == 2
    assert invoke("csv2tb", broken_run, tmp_path / "tb", "--steps", "5000-6000").exit_code == 2


def test_version():
    assert invoke("--version").output.strip() == trainsentry.__version__
