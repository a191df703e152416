"""With `same_step` the very step is judged, dumped and stopped before its update; without, a later one is dumped."""

import json

import pytest
import torch
from device_training import adamw, config_of, loss_of, new_model, train
from the_device import DEVICE

import trainsentry
from trainsentry.collectors.torch.saving import load_tensor

AT = 13
NAME = "blocks.1.down.weight"


def dump_of(out, step):
    """Return the description of a dump, and its tensors by file name."""
    directory = out / "dump" / f"step{step}" / "rank0"
    data = json.loads((directory / "dump.json").read_text())
    return data, {path.name: load_tensor(path) for path in (directory / "dump_tensor_data").iterdir()}


def break_weight(model, step):
    if step == AT:
        model.blocks[1].down.weight.detach()[1, 2] = float("nan")


def test_the_step_itself_is_dumped_with_what_its_update_starts_from_and_the_weights_stay(out):
    model = new_model()
    optimizer = adamw(model)
    config = config_of(out, on_incident={"stop": True, "dump": {"same_step": True}})
    with trainsentry.TrainMonitor(config).watch(model, optimizer):
        for step in range(AT + 1):
            break_weight(model, step)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step == AT:
                break
            optimizer.step()
        weight, other = model.blocks[1].down.weight, model.blocks[0].up.weight
        held = weight.detach().cpu().clone(), other.detach().cpu().clone(), weight.grad.cpu().clone()
        moment = optimizer.state[weight]["exp_avg"].cpu().clone()
        with pytest.raises(trainsentry.TrainingStopped) as stopped:
            optimizer.step()
    assert (stopped.value.step, stopped.value.incident.name) == (AT, NAME)
    assert torch.equal(other.detach().cpu(), held[1])
    description, tensors = dump_of(out, AT)
    assert (description["step"], description["moment"]) == (AT, "before_update")
    stem = "Module.blocks.1.down.Linear"
    for name, want in (
        (f"{stem}.forward.0.parameters.weight.pt", held[0]),
        (f"{stem}.parameters_grad.0.weight.pt", held[2]),
        (f"{stem}.optimizer_state.0.weight.exp_avg.pt", moment),
    ):
        assert torch.equal(tensors[name].cpu().nan_to_num(7.0), want.nan_to_num(7.0)), name


def test_without_it_the_incident_is_dumped_a_little_later(out):
    config = config_of(out, on_incident={"dump": {"same_step": False}})
    ran = train(config, before_step=break_weight, settled=True)
    assert ran.incidents != ()
    [directory] = (out / "dump").iterdir()
    step = int(directory.name.removeprefix("step"))
    assert AT < step <= AT + 3
    description, tensors = dump_of(out, step)
    assert description["step"] == step
    assert any(torch.isnan(t).any() for t in tensors.values() if t.is_floating_point())


@pytest.mark.skipif(DEVICE.type == "cpu", reason="on the CPU `auto` is on")
def test_auto_is_off_on_an_accelerator(out):
    config = config_of(out, on_incident={"stop": True, "dump": {"same_step": "auto"}})
    assert train(config, before_step=break_weight, settled=True).stopped.step > AT


def test_dumped_tensors_are_written_for_a_reader_without_the_device(out):
    train(config_of(out, on_incident={"dump": {"same_step": True}}), before_step=break_weight, steps=AT + 3)
    _, tensors = dump_of(out, AT)
    assert tensors
    assert {t.device.type for t in tensors.values()} == {"cpu"}
