"""A replay repeats a forward pass with the device's own random numbers; one seed makes all devices draw the same."""

import random

import numpy as np
import pytest
import torch
from device_training import config_of
from the_device import DEVICE
from torch import nn

import trainsentry

AT = 13


def draws():
    return random.random(), float(np.random.rand()), torch.rand(1).item(), torch.rand(3, device=DEVICE).tolist()


def test_one_seed_makes_every_source_draw_the_same():
    trainsentry.seed_all(5, rm_dropout=False)
    first = draws()
    trainsentry.seed_all(5, rm_dropout=False)
    assert draws() == first
    trainsentry.seed_all(6, rm_dropout=False)
    assert draws() != first


class Noisy(nn.Module):
    """Batch norm, dropout and, when `bad`, an operation whose results are never the same."""

    def __init__(self, bad):
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.bad, self.calls = bad, 0

    def forward(self, x):
        self.calls += 1
        x = nn.functional.dropout(self.norm(self.first(x)), 0.5)
        return self.last(x * (1 + self.calls * 1e-3) if self.bad else x)


def replayed(out, *, bad, replay=True):
    """Train until a weight is NaN; return the state after it, what random numbers follow, and the replay's verdict."""
    torch.manual_seed(0)
    model = Noisy(bad).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = config_of(out, on_incident={"dump": {"replay": replay, "same_step": True}})
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        generator = torch.Generator().manual_seed(1)
        for step in range(AT + 3):
            if step == AT:
                model.last.weight.detach()[1, 2] = float("nan")
            model(torch.randn(8, 16, generator=generator).to(DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        actions = [action for incident in monitor.incidents for action in incident.actions]
    state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    return state, torch.rand(3, device=DEVICE).tolist(), [a for a in actions if a.startswith("replay")]


@pytest.mark.parametrize("bad", [False, True])
def test_a_replay_tells_data_from_device_and_leaves_everything_as_it_was(out, tmp_path, bad):
    state, following, [action] = replayed(out, bad=bad)
    plain, plain_following, none = replayed(tmp_path / "plain", bad=False, replay=False)
    assert none == []
    assert following == plain_following
    if bad:
        assert "the device is faulty, or an operation is not deterministic" in action
    else:
        assert "bitwise equal: the cause is data or numerics, not the device" in action
        assert all(torch.equal(state[name].nan_to_num(7), plain[name].nan_to_num(7)) for name in plain)
