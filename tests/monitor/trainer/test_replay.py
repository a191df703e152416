"""A replay of the suspect tells data from device, and leaves everything as it was."""

import json

import pytest
import torch
from broken_weight import FLIP, break_weight, make

import trainsentry


class Noisy(torch.nn.Module):
    """Batch norm, dropout and, when `bad`, an operation whose results are never the same."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16)
        self.first = torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 16)
        self.calls = 0
        self.bad = False

    def forward(self, x):
        self.calls += 1
        x = torch.nn.functional.dropout(self.norm(self.first(x)), 0.5)
        return self.last(x * (1 + self.calls * 1e-3) if self.bad else x)


def replayed(out, *, bad, replay=True):
    """Train with a weight that becomes NaN; return the state after it, the incident's actions and the output folder."""
    torch.manual_seed(0)
    model = Noisy()
    model.bad = bad
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = {"output_dir": str(out), "strict": True, "on_incident": {"dump": {"replay": replay}}}
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)

    def before_step(step):
        if step == FLIP:
            with torch.no_grad():
                model.last.weight[1, 2] = float("nan")

    with monitor:
        generator = torch.Generator().manual_seed(1)
        for step in range(FLIP + 3):
            before_step(step)
            model(torch.randn(8, 16, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        actions = [a for i in monitor.incidents for a in i.actions]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, torch.get_rng_state(), [a for a in actions if a.startswith("replay")]


@pytest.mark.parametrize("bad", [False, True])
def test_a_replay_tells_data_from_device_and_leaves_everything_as_it_was(out, tmp_path, bad):
    state, rng, [action] = replayed(out, bad=bad)
    plain, plain_rng, none = replayed(tmp_path / "plain", bad=False, replay=False)
    assert none == []
    assert torch.equal(rng, plain_rng)
    if not bad:
        assert all(torch.equal(state[n].nan_to_num(7), plain[n].nan_to_num(7)) for n in plain)
        assert "bitwise equal: the cause is data or numerics, not the device" in action
    else:
        assert "first differ at" in action
        assert "the device is faulty, or an operation is not deterministic" in action
    for i in range(2):
        folder = out / "dump" / f"step{FLIP}" / "rank0" / f"replay{i}"
        data = json.loads((folder / "dump.json").read_text())["data"]
        assert "Module.last.Linear.forward.0" in data
        assert data["Module.last.Linear.forward.0"]["output"][0]["md5"]


def test_inputs_that_were_changed_since_are_not_replayed(out):
    model, optimizer, monitor = make(out, on_incident={"dump": {"replay": True}})
    x = torch.randn(4, 8)
    with monitor:
        for step in range(FLIP + 2):
            break_weight(model)(step)
            model(x).square().mean().backward()
            x.add_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        actions = [a for i in monitor.incidents for a in i.actions]
    assert "replay: not done: its inputs were changed in place since" in actions
