"""A fault in the trainer's part of the monitor is logged once and counted, and training goes on."""

import json

import pytest
from tiny_models import EVERY_STEP, flip_bit, train
from watched import STEPS, bare, errors, gaps, make, plant, rows, status

import trainsentry
from trainsentry.collectors.torch import saving, watch
from trainsentry.collectors.torch.hooks import activations
from trainsentry.collectors.torch.parameters import gradient_reader, model_state, readers

PLACES = {
    "activations": (activations.ActivationHooks, "_observe"),
    "gradients": (gradient_reader.GradientReader, "read_taken"),
    "parameters": (model_state, "read_parameters"),
    "optimizer_state": (model_state, "read_state"),
    "updates": (readers.UpdateReader, "keep"),
    "log": (watch.TorchWatch, "log"),
    "step boundary": (watch.TorchWatch, "before_update"),
}


@pytest.mark.parametrize("part", PLACES)
def test_an_exception_planted_in_a_hook_is_contained(out, monkeypatch, caplog, part):
    expected = bare()
    owner, name = PLACES[part]
    monkeypatch.setattr(owner, name, plant)
    model, optimizer, monitor = make(out)
    with monitor:
        assert train(model, optimizer, STEPS, monitor).losses == expected
    assert [part in r.getMessage() for r in errors(caplog)] == [True]
    assert status(out)["failures"][part]["count"] == 1
    if part != "step boundary":
        others = {"gradient", "parameter"} - {part.rstrip("s")}
        assert all((out / "rank0" / f"{name}_0-999.csv").exists() for name in others)
    assert not any(m._forward_hooks for m in model.modules())


def test_strict_lets_it_through(out, monkeypatch):
    monkeypatch.setattr(model_state, "read_parameters", plant)
    model, optimizer, monitor = make(out, strict=True)
    with monitor, pytest.raises(OSError, match="planted"):
        train(model, optimizer, STEPS, monitor)


def test_a_dump_that_fails_is_contained(out, monkeypatch, caplog):
    monkeypatch.setattr("trainsentry.collectors.torch.saving.save_tensor", plant)
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=lambda s: flip_bit(model[2].weight) if s == 8 else None)
        monitor.flush()
        assert [i.name for i in monitor.incidents] == ["2.weight"]
    assert status(out)["failures"]["dump"]["count"] == 1


def test_a_dump_that_fails_in_a_hook_is_given_up_and_its_hooks_are_gone(out, monkeypatch, caplog):
    original, calls = saving.save_tensor, []

    def fails_later(tensor, path):
        calls.append(path)
        if "step9" in str(path):
            raise OSError(28, "No space left on device")
        original(tensor, path)

    monkeypatch.setattr(saving, "save_tensor", fails_later)
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=lambda s: flip_bit(model[2].weight) if s == 8 else None)
        assert not monitor._loop.watch.capture.attached
    assert sum("step9" in str(path) for path in calls) == 1
    lines = [r.getMessage() for r in errors(caplog)]
    assert len(lines) == 1
    assert "No space left" in lines[0]
    assert "Traceback" not in lines[0]


def test_a_checkpoint_whose_learned_state_is_unfit_costs_that_state_alone(out, tmp_path, caplog):
    model, optimizer, first = make(tmp_path / "first")
    with first:
        train(model, optimizer, STEPS, first)
        state = first.state_dict()
    saved = json.loads(state["detection"])
    del saved["learned"]["state"]
    state["detection"] = json.dumps(saved)
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "collect": EVERY_STEP})
    monitor.load_state_dict(state)
    with monitor.watch(model, optimizer):
        train(model, optimizer, STEPS, monitor)
    assert gaps(out) == [("learned state", STEPS, STEPS)]
    assert sum(rows(out, name=f"_{STEPS}-999.csv").values()) == 4 * STEPS
    [line] = [r.getMessage() for r in errors(caplog)]
    assert line.startswith("trainsentry: learned state (what the detectors know of the past; they begin without it)")
