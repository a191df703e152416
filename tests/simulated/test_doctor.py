"""The doctor examines a device as it would an NPU: each check runs there, and one that fails says what to do."""

import json
from dataclasses import replace

import pytest
import simulated_npu
import torch
from typer.testing import CliRunner

from trainsentry.collectors.torch.device.npu import NPU
from trainsentry.monitor.cli.app import app
from trainsentry.monitor.demo.model import GptConfig
from trainsentry.monitor.doctor import torch_device, torch_ranks, torch_training, verdicts
from trainsentry.monitor.doctor.check import attempt

CHECKS = {
    "device npu:0", "device npu:1", "device software", "float64", "Triton", "overflow", "reading of tensors",
    "recorder", "no harm", "truth", "culprit", "cost",
}  # fmt: skip

SMALL = GptConfig(layers=2, width=16, heads=2, context=8)


@pytest.fixture(autouse=True)
def _few_bytes(monkeypatch):
    monkeypatch.setattr(torch_device, "BYTES", {True: 2**16, False: 2**16})
    monkeypatch.setattr(torch_training, "SIZES", SMALL)


def test_every_check_runs_on_the_device_and_finds_it_well(tmp_path):
    ran = CliRunner().invoke(app, ["doctor", "--device", "auto", "--out", str(tmp_path / "doctor.json")])
    found = json.loads((tmp_path / "doctor.json").read_text())
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert set(states) >= CHECKS
    # Kernels are not compiled for it, so that plain operations of torch read its tensors.
    assert {name for name, state in states.items() if state != "OK"} <= {"Triton", "reading of tensors"}
    assert ran.exit_code == 0, ran.output


def test_the_overflow_mode_is_named():
    assert "Inf or NaN" in torch_device._overflow(NPU).found
    with simulated_npu.saturating():
        assert "saturates" in torch_device._overflow(NPU).found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A bare training and a watched one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_training, "SIZES", SMALL)
        everything, _, _ = verdicts.configurations(str(tmp_path_factory.mktemp("doctor")))
        return torch_training.train(NPU), torch_training.train(NPU, everything)


def test_a_device_that_trains_otherwise_when_it_is_watched_is_found_out(trained):
    bare, watched = trained
    assert verdicts.harm(bare, bare, watched).state == "OK"
    other = replace(watched, losses=[*watched.losses[:-1], watched.losses[-1] + 1e-7])
    harm = verdicts.harm(bare, bare, other)
    assert (harm.state, "doctor.json" in harm.advice) == ("wrong", True)
    weights = [*watched.weights[:-1], watched.weights[-1] + 1e-7]
    assert verdicts.harm(bare, bare, replace(watched, weights=weights)).state == "wrong"
    assert "not comparable" in verdicts.harm(bare, other, watched).found


def test_wrong_and_missing_numbers_are_found_out(trained):
    _, watched = trained
    assert verdicts.truth(watched, 1e-4).state == "OK"
    wrong = {name: 1.01 * norm for name, norm in watched.recorded.items()}
    assert verdicts.truth(replace(watched, recorded=wrong), 1e-4).state == "wrong"
    assert "29 of 29 gradients have no row" in verdicts.truth(replace(watched, recorded={}), 1e-4).found


def test_a_recorder_that_is_a_thread_is_slow(trained):
    assert verdicts.recorder(trained[1]).state == "OK"
    assert verdicts.recorder(replace(trained[1], recorder="thread")).state == "slow"


def test_a_device_that_fails_is_a_finding(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("EZ9999: inner error at /home/ada/cann")

    monkeypatch.setattr(torch, "randn", broken)
    *before, last = attempt("device", lambda: torch_device.device_checks(NPU))
    assert before[0].state == "OK"
    assert (last.state, last.found) == ("wrong", "RuntimeError: EZ9999: inner error at <path>")


def rank_states():
    """Return the state of each check among ranks."""
    torch_ranks.ELEMENTS = 1024
    device = torch_device.chosen_device("auto")
    with torch_ranks.joined(device):
        return device.type, [(check.name, check.state) for check in torch_ranks.rank_checks(device)]


def test_ranks_are_examined_over_the_devices_own_collectives(two_npus):
    expected = ("npu", [("2 ranks over hccl", "OK"), ("no harm among ranks", "OK")])
    assert two_npus.run(rank_states) == [expected, expected]
