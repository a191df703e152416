"""What a model is given, and is given again, is told in real trainings of two families."""

import pytest
import torch
from torch import nn
from two_families import CONFIGURATIONS, FAMILIES, FAULT, train

import trainsentry


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("collect", CONFIGURATIONS)
def test_a_loader_that_begins_to_serve_batches_twice_is_named(tmp_path, family, collect):
    kept = {}

    def twice(step, given):
        if step < FAULT or step % 2 == FAULT % 2:
            kept["batch"] = given
        return kept["batch"]

    [found, *_] = train(tmp_path, family, collect=collect, batch=twice)
    assert (found.quantity, found.name, found.step) == ("data", "input.0", FAULT + 1)
    assert "serves batches twice" in found.summary


class Weighted(nn.Module):
    """A body whose tokens, or pixels, a mask may hide."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, mask=None):
        return self.body(x if mask is None else (x * mask).to(x.dtype))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("collect", CONFIGURATIONS)
@pytest.mark.parametrize("lost", [True, False])
def test_a_mask_that_gets_lost_is_the_first_suspect(tmp_path, family, collect, lost):
    make, data, *_ = FAMILIES[family]
    torch.manual_seed(0)
    model = Weighted(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    config = {"output_dir": str(tmp_path), "strict": True, "on_incident": False, "collect": CONFIGURATIONS[collect]}
    generator = torch.Generator().manual_seed(1)
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(FAULT + 20):
            inputs, targets = data(generator)
            mask = (torch.rand(inputs.shape, generator=generator) > 0.1).float()
            output = model(inputs) if lost and step >= FAULT else model(inputs, mask=mask)
            loss = nn.functional.cross_entropy(output.flatten(0, -2), targets)
            loss.backward()
            monitor.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        found = sorted((i for i in monitor.incidents if i.severity != "note"), key=lambda i: i.id)
    assert [(i.name, i.quantity, i.step) for i in found[:1]] == [("input.mask", "data", FAULT)] * lost
