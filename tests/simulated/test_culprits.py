"""On a device too the first suspect is the culprit, its tensors are dumped, and the run is stopped or repeated."""

import json

import on_device
import pytest
import torch
from tiny_models import mlp

import trainsentry
from trainsentry.collectors.torch.saving import load_tensor

FAULT = 10


def run(out, before_step, steps=FAULT + 6, **settings):
    """Train with a fault; return the monitor's incidents, the steps that ran and the step of the stop."""
    model, optimizer = on_device.make("npu", mlp)
    done, stopped = [], None
    config = {"output_dir": str(out), "strict": True, **settings}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:

        def each(step):
            done.append(step)
            if step > FAULT:
                monitor.flush()  # these steps take a millisecond, and the recorder is a process of its own
            before_step(model, step)

        try:
            on_device.train(model, optimizer, on_device.batches(model, steps, "npu"), monitor, each)
        except trainsentry.TrainingStopped as error:
            stopped = error.step
        monitor.flush()
        return monitor.incidents, done, stopped, model


def break_weight(model, step):
    if step == FAULT:
        with torch.no_grad():
            model[2].weight[1, 2] = float("nan")


@pytest.mark.parametrize("same_step", [True, False])
def test_a_weight_that_breaks_is_the_first_suspect_and_is_dumped(out, same_step):
    settings = {"on_incident": {"dump": {"same_step": same_step}}}
    (incident, *_), _, _, _ = run(out, break_weight, **settings)
    assert (incident.name, incident.quantity, incident.step) == ("2.weight", "parameter", FAULT)
    # without a look at the step itself the incident is known a step or two later
    step = FAULT if same_step else min(int(p.name.removeprefix("step")) for p in (out / "dump").iterdir())
    folder = out / "dump" / f"step{step}" / "rank0"
    data = json.loads((folder / "dump.json").read_text())["data"]
    described = data["Module.2.Linear.forward.0"]["parameters"]["weight"]
    tensor = load_tensor(folder / "dump_tensor_data" / described["data_name"])
    assert torch.isnan(tensor).any()
    assert tensor.device.type == "cpu"


def test_a_run_is_stopped_at_its_incident(out):
    _, done, stopped, _ = run(out, break_weight, on_incident={"stop": True, "dump": False})
    assert FAULT <= stopped <= FAULT + 3
    assert len(done) <= stopped + 2


def test_a_replay_says_that_the_device_repeats_itself(out):
    incidents, *_ = run(out, break_weight, on_incident={"dump": {"replay": True, "same_step": True}})
    [action] = [a for i in incidents for a in i.actions if a.startswith("replay")]
    assert "are bitwise equal" in action, action


def test_random_numbers_of_a_replay_are_those_of_the_device(out):
    """With dropout, a replay that restored only the host's generator would differ."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)).to("npu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    config = {"output_dir": str(out), "strict": True, "on_incident": {"dump": {"replay": True, "same_step": True}}}

    def before_step(step):
        if step == FAULT:
            with torch.no_grad():
                model[2].weight[1, 2] = 1e25  # finite, so that another mask of dropout shows

    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        on_device.train(model, optimizer, on_device.batches(model, FAULT + 2, "npu"), monitor, before_step)
        monitor.flush()
        [action] = [a for i in monitor.incidents for a in i.actions if a.startswith("replay")]
    assert "are bitwise equal" in action, action


def test_one_seed_makes_the_device_draw_the_same():
    trainsentry.seed_all(5, rm_dropout=False)
    first = torch.rand(4, device="npu"), torch.rand(4, device="npu:1")
    trainsentry.seed_all(5, rm_dropout=False)
    assert torch.equal(torch.rand(4, device="npu"), first[0])
    assert torch.equal(torch.rand(4, device="npu:1"), first[1])
