"""A model that is spread over several devices of one process is read where its tensors lie."""

import pytest
import torch
from device_training import EVERYTHING, config_of
from the_device import DEVICE, ON_CPU, RELATIVE
from torch import nn

import trainsentry

COUNT = 1 if ON_CPU else torch.accelerator.device_count()

pytestmark = pytest.mark.skipif(COUNT < 2, reason="needs two devices")


class Spread(nn.Module):
    """Each layer on a device of its own, and a last one on the CPU."""

    def __init__(self):
        super().__init__()
        places = [torch.device(DEVICE.type, 0), torch.device(DEVICE.type, 1), torch.device("cpu")]
        self.layers = nn.ModuleList(nn.Linear(16, 16).to(place) for place in places)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(layer.weight.device))
        return x


def trained(config):
    torch.manual_seed(0)
    model = Spread()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer) if config is not None else None
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.full((4, 16), float(step))).square().mean()
        loss.backward()
        optimizer.step()
    norms = None
    if monitor is not None:
        norms = {name: row["norm"] for name, row in monitor.metrics("gradient").items()}
        monitor.close()
    gradients = {name: p.grad.double().norm().item() for name, p in model.named_parameters()}
    return loss.item(), gradients, norms


def test_every_device_is_read_and_training_is_the_same(out):
    bare, gradients, _ = trained(None)
    loss, _, norms = trained(config_of(out, collect=EVERYTHING))
    assert loss == bare
    assert norms == pytest.approx(gradients, rel=RELATIVE)
