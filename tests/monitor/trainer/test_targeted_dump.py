"""An incident dumps the right step: the suspects first, within a budget, and not too often."""

import copy
import json

import pandas as pd
import pytest
import torch
from broken_weight import FLIP, break_weight, dump_of, make
from tiny_models import train

from trainsentry import TrainingStopped


def test_same_step_dumps_the_step_itself_before_the_update(out):
    model, optimizer, monitor = make(out, collect={"activations": False})
    held = {}

    def keep(*_):
        held.update(weight=model[2].weight.detach().clone(), gradient=model[0].weight.grad.clone())
        held.update(exp_avg=optimizer.state[model[2].weight]["exp_avg"].clone())

    with monitor:
        train(model, optimizer, FLIP, monitor)
        handle = optimizer.register_step_pre_hook(keep)
        break_weight(model)(FLIP)
        train(model, optimizer, 1, monitor, seed=9)
        handle.remove()
        train(model, optimizer, 2, monitor)
        monitor.flush()
        [incident] = monitor.incidents
    assert (incident.name, incident.quantity, incident.step) == ("2.weight", "parameter", FLIP)
    data, tensors = dump_of(out, FLIP)
    assert (data["step"], data["moment"], data["task"], data["framework"]) == (
        FLIP,
        "before_update",
        "tensor",
        "pytorch",
    )
    stem = "Module.2.Linear"
    assert torch.equal(tensors[f"{stem}.forward.0.parameters.weight.pt"], held["weight"]) or torch.equal(
        tensors[f"{stem}.forward.0.parameters.weight.pt"].nan_to_num(7.0), held["weight"].nan_to_num(7.0)
    )
    assert torch.equal(
        tensors["Module.0.Linear.parameters_grad.0.weight.pt"].nan_to_num(7.0), held["gradient"].nan_to_num(7.0)
    )
    assert torch.equal(tensors[f"{stem}.optimizer_state.0.weight.exp_avg.pt"], held["exp_avg"])
    described = data["data"][f"{stem}.forward.0"]["parameters"]["weight"]
    assert described["data_name"] == f"{stem}.forward.0.parameters.weight.pt"
    assert described["type"] == "torch.Tensor"
    assert f"dump: dump/step{FLIP}/rank0" in " ".join(incident.actions)


def test_the_step_behind_it_is_dumped_whole_with_activations_and_their_gradients(out):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, FLIP + 3, monitor, before_step=break_weight(model))
    data, tensors = dump_of(out, FLIP + 1)
    assert data["step"] == FLIP + 1
    for name in ("forward.0.input.0", "forward.0.output.0", "backward.0.input.0", "forward.0.parameters.weight"):
        assert f"Module.2.Linear.{name}.pt" in tensors
    assert data["data"]["Module.2.Linear.forward.0"]["input_args"][0]["shape"] == [16, 16]
    directory = out / "dump" / f"step{FLIP + 1}" / "rank0"
    stacks = json.loads((directory / "stack.json").read_text())
    assert any("tiny_models.py" in line for _, lines in stacks.values() for line in lines)
    parents = json.loads((directory / "construct.json").read_text())
    assert parents["Module.2.Linear.forward.0"] is None  # the root is no suspect


def test_without_same_step_a_later_step_is_dumped_and_says_so(out):
    model, optimizer, monitor = make(out, on_incident={"dump": {"same_step": False}})
    with monitor:

        def before_step(step):
            monitor.flush()  # the recorder's word arrives at the next boundary
            break_weight(model)(step)

        train(model, optimizer, FLIP + 6, monitor, before_step=before_step)
    [directory] = (out / "dump").iterdir()
    step = int(directory.name.removeprefix("step"))
    assert FLIP < step <= FLIP + 3
    assert dump_of(out, step)[0]["step"] == step


def test_the_budget_keeps_the_first_suspect_and_names_what_was_left_out(out):
    model, optimizer, monitor = make(out, on_incident={"dump": {"max_bytes": 300}})
    with monitor:
        train(model, optimizer, FLIP + 2, monitor, before_step=break_weight(model))
    data, tensors = dump_of(out, FLIP)
    assert "Module.2.Linear.forward.0.parameters.weight.pt" in tensors
    assert sum(t.numel() * t.element_size() for t in tensors.values()) <= 300
    assert data["left_out"]


def test_the_cool_down_separates_dumps(out):
    model, optimizer, monitor = make(out, on_incident={"dump": {"cooldown_steps": 60}, "sample_every_step_for": 0})
    with monitor:

        def before_step(step):
            monitor.flush()  # so that what the recorder says does not depend on who is faster
            places = {13: model[2].weight, 45: model[0].weight, 90: model[2].bias}  # the same would be one incident
            with torch.no_grad():
                if step in places:
                    places[step].view(-1)[2] = float("nan")
                if step in {14, 46, 91}:
                    for p in model.parameters():
                        p.nan_to_num_(0.1)
                    for state in optimizer.state.values():
                        state["exp_avg"].nan_to_num_(0.0)
                        state["exp_avg_sq"].nan_to_num_(1e-4)

        train(model, optimizer, 95, monitor, before_step=before_step)
        monitor.flush()
        assert len(monitor.incidents) == 3
    dumped = sorted(int(p.name.removeprefix("step")) for p in (out / "dump").iterdir())
    assert {13, 90} <= set(dumped)
    assert not [step for step in dumped if 40 <= step < 80]


def test_dump_false_writes_none(out):
    model, optimizer, monitor = make(out, on_incident={"dump": False})
    with monitor:
        train(model, optimizer, FLIP + 3, monitor, before_step=break_weight(model))
    assert not (out / "dump").exists()


def test_a_soft_incident_is_dumped_before_the_stop(out):
    collect = {"parameters": {"every": 1}}
    model, optimizer, monitor = make(out, on_incident={"stop": True}, collect=collect)

    def before_step(step):
        monitor.flush()
        if step == FLIP:
            model[2].weight.detach()[1, 2] = 6.0  # 25 times the largest, and finite: no hard rule fires

    with monitor, pytest.raises(TrainingStopped) as stopped:
        train(model, optimizer, 60, monitor, before_step=before_step)
    assert stopped.value.incident.name == "2.weight"
    data, tensors = dump_of(out, stopped.value.step)
    assert "Module.2.Linear.forward.0.output.0.pt" in tensors
    assert data["step"] == stopped.value.step


def test_after_a_rollback_a_new_fault_is_a_new_incident_with_its_dump_in_new_files(out):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, 20, monitor)
        state, weights = monitor.state_dict(), copy.deepcopy(model.state_dict())
        moments = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 15, monitor, before_step=break_weight(model, at=5))
        monitor.flush()
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        monitor.load_state_dict(state)

        def before_step(step):
            if step == 7:
                model[0].weight.detach()[0, 0] = float("nan")

        train(model, optimizer, 10, monitor, before_step=before_step)
        monitor.flush()
        found = {i.id: (i.name, i.first_seen) for i in monitor.incidents}
    assert found == {1: ("2.weight", 25), 2: ("0.weight", 27)}
    assert {"step25", "step27"} <= {p.name for p in (out / "dump").iterdir()}
    assert set(pd.read_csv(out / "rank0" / "gradient_20-999.r1.csv")["step"]) == set(range(20, 30))
