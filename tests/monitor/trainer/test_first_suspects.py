"""A NaN is traced to its source: the data, a module or a weight."""

import pytest
import torch
from broken_weight import FLIP, make
from tiny_models import mlp, train

import trainsentry
from trainsentry import TrainingStopped


def test_a_nan_in_the_data_names_the_data(out):
    model, optimizer, monitor = make(out, collect={"activations": {"every": 1}})
    with monitor:
        train(model, optimizer, FLIP, monitor)
        optimizer.zero_grad()
        x = torch.ones(4, 8)
        x[1, 1] = float("nan")
        model(x).sum().backward()
        optimizer.step()
        monitor.flush()
        [incident] = monitor.incidents
    assert (incident.name, incident.quantity) == ("input.0", "data")


def test_a_nan_made_by_a_module_names_the_module(out):
    model, optimizer, monitor = make(out, collect={"activations": {"every": 1}})
    handle = None

    def before_step(step):
        nonlocal handle
        if step == FLIP:
            handle = model[1].register_forward_hook(lambda m, a, o: torch.where(o > 1.0, float("nan"), o), prepend=True)

    with monitor:
        train(model, optimizer, FLIP + 1, monitor, before_step=before_step)
        monitor.flush()
        [incident] = monitor.incidents
    assert (incident.name, incident.quantity, incident.step) == ("1.output.0", "activation_output", FLIP)
    assert [s.name for s in incident.suspects][:3] == ["1.output.0", "2.output.0", "output.0"]


@pytest.mark.parametrize("at", [20, 23])
@pytest.mark.parametrize("same_step", [True, False])
def test_a_frozen_weight_that_breaks_is_named(out, at, same_step):
    torch.manual_seed(0)
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
    config = {"output_dir": str(out), "strict": True, "on_incident": {"dump": {"same_step": same_step}}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:

        def before_step(step):
            monitor.flush()
            if step == at:
                model[0].weight.detach()[0, 0] = float("nan")

        train(model, optimizer, at + 6, monitor, before_step=before_step)
        monitor.flush()
        assert [(i.name, i.quantity) for i in monitor.incidents] == [("0.weight", "parameter")]


@pytest.mark.parametrize("at", [20, 23])
def test_the_weight_of_an_optimizer_that_steps_later_is_named(out, at):
    torch.manual_seed(0)
    model = mlp()
    head, body = (torch.optim.AdamW(model[i].parameters(), lr=1e-3) for i in (2, 0))
    config = {"output_dir": str(out), "strict": True, "on_incident": {"stop": True}}
    monitor = trainsentry.TrainMonitor(config).watch(model, [head, body])

    def train_both():
        for step in range(at + 5):
            if step == at:
                model[0].weight.detach()[0, 0] = float("nan")
            for optimizer in (head, body):
                optimizer.zero_grad()
            loss = model(torch.randn(16, 8)).pow(2).mean()
            loss.backward()
            monitor.log(loss=loss)
            for optimizer in (head, body):
                optimizer.step()

    with monitor:
        with pytest.raises(TrainingStopped) as stopped:
            train_both()
        assert (stopped.value.incident.name, stopped.value.step) == ("0.weight", at)
