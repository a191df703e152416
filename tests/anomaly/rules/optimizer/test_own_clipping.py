"""An optimizer that clips inside its step, past torch's counts of writes, is no fault; a state that is wrong is."""

import pytest
import torch
from tiny_models import mlp

import trainsentry

LARGEST = 0.5


class Clipping(torch.optim.AdamW):
    """Clips each element of its gradients, as Pyro's does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.data.clamp_(-LARGEST, LARGEST)
        return super().step(closure)


@pytest.mark.parametrize("harmed", [False, True])
def test_gradients_larger_than_all_that_were_followed_say_nothing_and_others_do(tmp_path, harmed):
    torch.manual_seed(0)
    model = mlp()
    optimizer = Clipping(model.parameters(), lr=1e-3)
    width = next(p for p in model.parameters() if p.dim() == 2).shape[1]
    config = {"output_dir": str(tmp_path), "on_incident": False, "collect": {"optimizer_state": {"every": 5}}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(300):
            optimizer.zero_grad()
            scale = 40.0 if step % 37 == 36 else 1.0
            (model(torch.randn(8, width)).square().mean() * scale).backward()
            optimizer.step()
            if harmed and step == 250:
                state = optimizer.state[next(model.parameters())]
                state["exp_avg"].add_(0.1 * state["exp_avg"].norm())
    told = {(i.name, s.kind) for i in monitor.incidents for s in i.suspects if s.kind == "recurrence"}
    first = next(name for name, _ in model.named_parameters())
    assert told == ({(first, "recurrence")} if harmed else set())
