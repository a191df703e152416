"""The demo finds the weight that broke, and stays silent when none does."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_scripts import Script, start_forked
from typer.testing import CliRunner
from written_files import scalars

from trainsentry.monitor.cli.app import app


def invoke(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def assert_what_is_named_is_there(output, out):
    """Check that the files at the end of a demo are there, the report among them."""
    [listed] = re.findall(r"Written to .*?MB(.*?)Open it:", output, re.DOTALL)
    named = [line.split()[0] for line in listed.splitlines() if line.startswith("  ")]
    assert {"incidents.jsonl", "report.html", "rank0"} <= set(named)
    assert all((out / name).exists() for name in named)


@pytest.mark.parametrize("parameter", ["token.weight", "blocks.0.norm2.weight"])
def test_the_first_suspect_is_the_flipped_parameter(tmp_path, parameter):
    out = tmp_path / "demo"
    result = invoke("demo", "--steps", 60, "--seed", 4, "--fault-parameter", parameter, "--output-dir", out)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "The first suspect is the flipped parameter." in text
    assert re.search(rf"bit 30 of element \d+ of {re.escape(parameter)} \(", text)
    [line] = [json.loads(x) for x in (out / "incidents.jsonl").read_text().splitlines()][-1:]
    assert (line["name"], line["quantity"]) == (parameter, "parameter")
    assert any("dump" in action for action in line["actions"])
    assert "tensorboard --logdir" in text
    assert f"gradient.norm/{parameter}" in scalars(out / "tensorboard" / "rank0")
    assert_what_is_named_is_there(result.output, out)


def test_a_clean_run_reports_nothing(tmp_path):
    result = invoke("demo", "--steps", 60, "--fault", "none", "--output-dir", tmp_path / "demo")
    assert result.exit_code == 0, result.output
    assert "the monitor reported nothing" in " ".join(result.output.split())
    assert not (tmp_path / "demo" / "incidents.jsonl").exists()


def test_overflow_nums_ends_the_run(tmp_path):
    out = tmp_path / "demo"
    args = ["--steps", 60, "--fault-parameter", "norm.weight", "--stop", "overflow", "--overflow-nums", 2, "--seed", 1]
    result = invoke("demo", *args, "--output-dir", out)
    assert result.exit_code == 0, result.output
    assert "Stopped by overflow_nums at step 31" in " ".join(result.output.split())


def test_an_unknown_parameter_is_bad_input(tmp_path):
    result = invoke("demo", "--steps", 20, "--fault-parameter", "nothing", "--output-dir", tmp_path / "demo")
    assert result.exit_code == 2


@pytest.mark.parametrize(
    "args",
    [
        ["--device", "npu"],
        ["--device", "npu", "--ranks", 2],
        ["--framework", "mindspore", "--device", "cpu"],
        ["--framework", "mindspore", "--ranks", 2],
    ],
)
def test_a_device_that_is_not_there_ends_the_demo_before_it_writes_anything(tmp_path, args, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    result = invoke("demo", "--steps", 20, *args, "--output-dir", tmp_path / "demo")
    assert result.exit_code == 2
    told = " ".join((result.output + result.stderr).split())
    assert re.search(r"allowed( here)?: (auto|1)", told), told
    assert not (tmp_path / "demo").exists()


def test_the_readmes_twelve_lines_run_as_they_stand(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    [code] = re.findall(r"```python\n(import torch.*?)```", readme, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "monitor_output" / "rank0" / "gradient_0-999.csv").exists()


RANK = "import runpy; runpy.run_module('trainsentry.monitor.demo.ranks', run_name='__main__', alter_sys=True)"


@pytest.fixture
def forked_ranks(monkeypatch):
    """Fork the ranks of a demo from a process that has imported what they import."""

    def fork(command, env, **_):
        return start_forked(Script(RANK, command[3:]), environment=env)

    popen = SimpleNamespace(Popen=fork, PIPE=subprocess.PIPE)
    monkeypatch.setattr("trainsentry.monitor.demo.ranks.subprocess", popen)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])  # the clean run below is of fsdp2
def test_on_two_ranks_the_rank_and_the_layer_are_named(tmp_path, strategy, request):
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    if strategy != "ddp":  # that one starts its ranks as it does for users
        request.getfixturevalue("forked_ranks")
    out = tmp_path / "demo"
    result = invoke("demo", "--ranks", 2, "--strategy", strategy, "--steps", 30, "--seed", 1, "--output-dir", out)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "The first suspect is this parameter on this rank." in text
    assert "Stopped on 2 ranks, at step" in text
    assert_what_is_named_is_there(result.output, out)
    last = json.loads((out / "incidents.jsonl").read_text().splitlines()[-1])
    assert last["rank"] == 1
    assert not any(s["kind"] == "communication_mismatch" for s in last["suspects"])


@pytest.mark.usefixtures("forked_ranks")
def test_a_clean_run_on_two_ranks_reports_nothing(tmp_path):
    args = ["--ranks", 2, "--strategy", "fsdp2", "--fault", "none", "--steps", 30]
    result = invoke("demo", *args, "--output-dir", tmp_path / "demo")
    assert result.exit_code == 0, result.output
    assert "the monitor reported nothing" in " ".join(result.output.split())
