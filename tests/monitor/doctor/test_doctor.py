"""The doctor's table says what is there, what is slow and what is missing, and its file holds no secret."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.monitor.cli.app import app
from trainsentry.monitor.demo.model import GptConfig
from trainsentry.monitor.doctor import machine, torch_device, torch_ranks, torch_training
from trainsentry.monitor.doctor.check import Check, attempt, without_secrets
from trainsentry.monitor.doctor.examination import examine
from trainsentry.monitor.doctor.torch_ranks import joined

SECRET = "hf_Zx8Qw2Lk9Vb3Nm7Rt5Yp1Ds4Gh6Jf0Kc"


@pytest.fixture(autouse=True)
def _few_bytes(monkeypatch):
    monkeypatch.setattr(torch_device, "BYTES", {True: 2**20, False: 2**20})
    monkeypatch.setattr(torch_training, "SIZES", GptConfig(layers=2, width=16, heads=2, context=8))


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_a_healthy_machine_is_well_and_the_file_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    ran = doctor("--device", "cpu", "--out", str(tmp_path / "doctor.json"))
    text = (tmp_path / "doctor.json").read_text()
    found = json.loads(text)
    states = {check["name"]: check["state"] for check in found["checks"]}
    # On a busy machine reading may be slow; everything else does not depend on that.
    assert {name for name, state in states.items() if state != "OK"} <= {"reading of tensors"}
    assert {"no harm", "truth", "culprit", "recorder", "memory shared with the recorder"} <= set(states)
    assert ran.exit_code == 0, ran.output
    for secret in (SECRET, os.uname().nodename, str(tmp_path), os.environ.get("USER") or "no user"):
        assert secret not in text
    assert found["variables"]["OMP_NUM_THREADS"] == "1"
    assert list(tmp_path.iterdir()) == [tmp_path / "doctor.json"]  # the trainings leave nothing behind


def test_a_device_that_is_not_there_is_missing_and_what_to_install_is_named():
    ran = doctor("--device", "npu")
    assert ran.exit_code == 1
    assert "missing" in ran.output
    assert "torch_npu" in ran.output


def test_a_device_that_nobody_knows_is_bad_input():
    ran = doctor("--device", "toaster")
    assert ran.exit_code == 2
    assert "--device: got 'toaster'; allowed: auto, cpu, cuda, npu" in ran.output


def test_a_file_that_cannot_be_written_is_bad_input(tmp_path, monkeypatch):
    monkeypatch.setattr("trainsentry.monitor.cli.doctor.examine", lambda _: iter([Check("a", "OK", "b")]))
    assert doctor("--out", str(tmp_path / "nowhere" / "doctor.json")).exit_code == 2


def test_what_cannot_be_compiled_or_written_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "is_compiled", lambda: False)
    assert machine._native_kernel().state == "slow"
    monkeypatch.setattr(machine, "packages", lambda: {"numpy": "2.0"})
    assert machine._frameworks().state == "missing"
    monkeypatch.setattr(machine, "LEAST_DISK", 2**60)
    assert machine._disk().state == "missing"


def test_memory_that_cannot_be_shared_is_a_finding(monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine.Ring, "create", full)
    *before, last = attempt("machine", machine.machine_checks)
    assert before[0].name == "trainsentry"  # what was found before is kept
    assert (last.state, last.found) == ("wrong", "OSError: [Errno 28] No space left on device")


@pytest.mark.parametrize(
    "text",
    [
        "Permission denied: '/data/projects/secret-model/run7'",
        f"401 Client Error: token {SECRET} is invalid",
        "connect to 192.168.17.4:29500 failed",
        "ada@example.com is not known",
    ],
)
def test_paths_addresses_and_tokens_are_left_out_of_errors(text):
    shown = without_secrets(text)
    for secret in ("secret-model", SECRET, "192.168", "ada@"):
        assert secret not in shown
    assert "<" in shown


@given(st.text(max_size=400))
def test_any_error_text_can_be_shown(text):
    assert len(without_secrets(text)) <= 310


def test_ranks_are_examined_under_a_launcher(tmp_path):
    out = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    script = (
        "import gc, glob\n"
        "from trainsentry.monitor.cli.app import main\n"
        "try: main()\n"
        "finally:\n"
        "    gc.collect()\n"
        "    threads = [open(path).read().strip() for path in glob.glob('/proc/self/task/*/comm')]\n"
        "    assert not any('gloo' in name for name in threads), 'the ranks were not left'\n"
    )
    ran = subprocess.run(
        [*command, sys.executable, "-c", script, "doctor", "--device", "cpu", "--out", str(out)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    states = {check["name"]: check["state"] for check in json.loads(out.read_text())["checks"]}
    assert states["2 ranks over gloo"] == "OK"
    assert states["no harm among ranks"] == "OK"
    assert ran.stdout.count("what to do") == 1  # rank 0 alone prints


def test_ranks_that_cannot_be_joined_or_left_are_in_the_report_beside_the_device(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    ran = doctor("--device", "cpu", "--out", str(tmp_path / "apart.json"))
    assert ran.exit_code == 1
    states = {check["name"]: check["state"] for check in json.loads((tmp_path / "apart.json").read_text())["checks"]}
    assert states["joining the ranks"] == "wrong"
    assert "reading of tensors" in states
    assert not any("ranks over" in name for name in states)

    @contextlib.contextmanager
    def stays(_):
        yield
        raise RuntimeError("they do not let go")

    monkeypatch.setattr(torch_ranks, "joined", stays)
    monkeypatch.setattr(torch_ranks, "rank_checks", lambda _: [Check("2 ranks over gloo", "OK", "")])
    made = {check.name: check for check in examine("cpu")}
    assert made["2 ranks over gloo"].state == "OK"
    assert made["leaving the ranks"].found == "RuntimeError: they do not let go"


def test_a_process_group_that_somebody_else_made_is_left_to_them():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with joined(CPU):
            assert dist.is_initialized()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
