"""The doctor examines a device as it would an NPU: each check runs there, and one that fails says what to do."""

import json

import pytest
import simulated_npu
import torch
from typer.testing import CliRunner

from trainsentry.collectors.torch.device.npu import NPU
from trainsentry.monitor.cli.app import app
from trainsentry.monitor.doctor import torch_device, torch_ranks, torch_training
from trainsentry.monitor.doctor.check import attempt

CHECKS = {
    "device npu:0", "device npu:1", "device software", "float64", "Triton", "overflow", "reading of tensors",
    "recorder", "no harm", "truth", "culprit", "cost",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _few_bytes(monkeypatch):
    monkeypatch.setattr(torch_device, "BYTES", {True: 2**20, False: 2**20})


@pytest.mark.parametrize("device", ["auto", "npu"])
def test_every_check_runs_on_the_device_and_finds_it_well(tmp_path, device):
    ran = CliRunner().invoke(app, ["doctor", "--device", device, "--out", str(tmp_path / "doctor.json")])
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


def test_a_device_that_trains_otherwise_when_it_is_watched_is_found_out(monkeypatch):
    train = torch_training.train

    def other(device, config=None, **kwargs):
        trained = train(device, config, **kwargs)
        if config is not None:
            trained.losses[-1] += 1e-7
        return trained

    monkeypatch.setattr(torch_training, "train", other)
    harm = {check.name: check for check in torch_training.training_checks(NPU)}["no harm"]
    assert (harm.state, "doctor.json" in harm.advice) == ("wrong", True)


def test_wrong_numbers_are_found_out(monkeypatch):
    norms = torch_training._norms
    monkeypatch.setattr(torch_training, "_norms", lambda model: {n: 1.01 * x for n, x in norms(model).items()})
    truth = {check.name: check for check in torch_training.training_checks(NPU)}["truth"]
    assert truth.state == "wrong"


def test_a_device_that_fails_is_a_finding(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("EZ9999: inner error at /home/ada/cann")

    monkeypatch.setattr(torch, "randn", broken)
    *before, last = attempt("device", lambda: torch_device.device_checks(NPU))
    assert before[0].state == "OK"
    assert (last.state, last.found) == ("wrong", "RuntimeError: EZ9999: inner error at <path>")


def rank_states():
    """Return the state of each check among ranks."""
    device = torch_device.chosen_device("auto")
    torch_ranks.join(device)
    return device.type, [(check.name, check.state) for check in torch_ranks.rank_checks(device)]


def test_ranks_are_examined_over_the_devices_own_collectives(two_npus):
    expected = ("npu", [("2 ranks over hccl", "OK"), ("no harm among ranks", "OK")])
    assert two_npus.run(rank_states) == [expected, expected]
