"""Steps that a graph of the device captures train as unwatched, and are read where the loop calls `step`."""

import pytest
import torch
from device_training import EVERYTHING, adamw, batch, config_of, new_model
from the_device import DEVICE, MODULE, needs
from torch.nn import functional as F

import trainsentry

pytestmark = needs("make_graphed_callables")


def captured_training(config, warm_up=3, replays=5):
    """Capture a whole step after a warm-up, and replay it; return the losses and the number of the last step."""
    model = new_model()
    optimizer = adamw(model, capturable=True)
    inputs, targets = batch(0)
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer) if config is not None else None

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    side = MODULE.Stream()
    side.wait_stream(MODULE.current_stream())
    with MODULE.stream(side):
        for _ in range(warm_up):
            step()
    MODULE.current_stream().wait_stream(side)
    graph = getattr(MODULE, f"{DEVICE.type.upper()}Graph")()
    optimizer.zero_grad(set_to_none=True)
    with MODULE.graph(graph):
        loss = step()
    losses, last = [], None
    for _ in range(replays):
        graph.replay()
        if monitor is not None:
            monitor.step()
        losses.append(loss.item())
    if monitor is not None:
        last = int(monitor.records()["step"].max())
        monitor.close()
    return losses, last


@pytest.mark.parametrize("collect", ["default", "everything"])
def test_a_whole_step_is_captured_and_replayed(out, collect):
    """Steps 3 to 11 are replays; of those the default configuration reads gradients in the tenth."""
    config = config_of(out, **({"collect": EVERYTHING} if collect == "everything" else {}))
    losses, last = captured_training(config, replays=9)
    assert losses == captured_training(None, replays=9)[0]
    assert last == (11 if collect == "everything" else 10)


def test_graphed_callables_train_as_unwatched(out):
    def trained(config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        x = torch.randn(8, 8, device=DEVICE, requires_grad=True)
        monitor = trainsentry.TrainMonitor(config).watch(model, optimizer) if config is not None else None
        graphed = MODULE.make_graphed_callables(model, (x,))
        losses = []
        for _ in range(5):
            loss = graphed(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if monitor is not None:
            monitor.close()
        return losses

    assert trained(config_of(out)) == trained(None)
