"""The doctor examines a machine with MindSpore alone: its device, and short trainings on it."""

import json

import mindspore as ms
import numpy as np
import pytest
from typer.testing import CliRunner

from trainsentry.monitor.cli.app import app
from trainsentry.monitor.demo import mindspore_training as demo
from trainsentry.monitor.doctor import examination, mindspore_device, mindspore_training, verdicts

CHECKS = {"device CPU", "mode", "float64", "overflow", "recorder", "no harm", "truth", "culprit", "cost"}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(demo, "WIDTH", 16)
    monkeypatch.setattr(demo, "LAYERS", 2)


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_every_check_is_made_and_a_healthy_machine_is_well(tmp_path, monkeypatch):
    for module in (mindspore_training, verdicts):  # half the steps: on two busy cores each takes half a second
        monkeypatch.setattr(module, "STEPS", 8)
    ran = doctor("--out", str(tmp_path / "doctor.json"))
    states = {check["name"]: check["state"] for check in json.loads((tmp_path / "doctor.json").read_text())["checks"]}
    assert set(states) >= {"trainsentry", "frameworks", *CHECKS}
    assert set(states.values()) == {"OK"}, ran.output
    assert ran.exit_code == 0
    assert "everything is OK" in ran.output
    assert list(tmp_path.iterdir()) == [tmp_path / "doctor.json"]  # the trainings leave nothing behind


def test_a_process_that_has_computed_already_is_examined_too():
    (ms.Tensor([1.0]) + 1.0).asnumpy()
    assert [mindspore_device.choose(name) for name in ("auto", "cpu")] == [None, None]


def test_a_device_that_is_not_there_is_missing_and_what_to_install_is_named(tmp_path):
    ran = doctor("--device", "npu", "--out", str(tmp_path / "doctor.json"))
    last = json.loads((tmp_path / "doctor.json").read_text())["checks"][-1]
    assert ran.exit_code == 1
    assert (last["name"], last["state"]) == ("device", "missing")
    assert "Ascend" in last["found"]
    assert last["advice"].startswith("install the MindSpore build for Ascend")


def test_a_device_that_nobody_knows_is_bad_input():
    ran = doctor("--device", "toaster")
    assert ran.exit_code == 2
    assert "--device: got 'toaster'; allowed: auto, cpu, npu, cuda" in ran.output


def test_saturation_is_named(monkeypatch):
    monkeypatch.setattr(mindspore_device, "saturates", lambda: True)
    assert "saturates" in {check.name: check.found for check in mindspore_device.device_checks()}["overflow"]


@pytest.fixture
def short(monkeypatch):
    """Trainings of a few steps."""
    for module in (mindspore_training, verdicts):
        monkeypatch.setattr(module, "STEPS", 3)


def test_a_watched_training_that_differs_or_records_wrong_numbers_is_found_out(tmp_path, short):
    everything, _, _ = verdicts.configurations(str(tmp_path))
    bare, watched = mindspore_training.train(), mindspore_training.train(everything)
    assert verdicts.harm(bare, bare, watched).state == "OK"
    assert verdicts.truth(watched, 1e-6).state == "OK"
    watched.weights[-1] = np.nextafter(watched.weights[-1], np.float32(9))
    assert verdicts.harm(bare, bare, watched).state == "wrong"
    watched.recorded[next(iter(watched.recorded))] *= 1.01
    assert verdicts.truth(watched, 1e-6).state == "wrong"
    assert verdicts.culprit(watched, mindspore_training.CULPRIT).state == "wrong"  # nothing was broken, or found


def test_without_any_framework_the_machine_alone_is_examined(monkeypatch):
    monkeypatch.setattr(examination, "find_spec", lambda _: None)
    assert next(check.name for check in examination.examine("auto")) == "trainsentry"
