"""An optimizer whose `step` calls its base class's takes one step, whatever else torch has wrapped."""

import pytest
import torch

import trainsentry
from trainsentry.collectors.torch.hooks.any_step import after_whole_steps


class Once(torch.optim.SGD):
    """Scales the update of its base class."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.mul_(0.999)


class Twice(Once):
    """Calls a base class that calls its own; `breaks` makes that fail, as often as it says."""

    breaks = 0

    def step(self, closure=None):
        if self.breaks:
            self.breaks -= 1
            try:
                super().step(lambda: 1 / 0)
            except ZeroDivisionError:
                return
        super().step(closure)


@pytest.fixture(autouse=True)
def bases_are_wrapped():
    for cls in (torch.optim.SGD, Once, Twice):  # torch wraps the `step` of a class when the first instance is made
        cls([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def train(optimizer, model, steps):
    for _ in range(steps):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("cls", [torch.optim.SGD, Once, Twice])
def test_each_step_is_one_record_with_the_update_of_the_whole(cls, out):
    model = torch.nn.Linear(4, 2)
    optimizer = cls(model.parameters(), lr=0.01)
    config = {"output_dir": str(out), "collect": {"updates": {"every": 1}}, "strict": True}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        train(optimizer, model, 4)
        before = model.weight.detach().clone()
        train(optimizer, model, 1)
        rows = monitor.records(last=1).query("name == 'weight' and quantity == 'update'")
        assert rows["norm"].iloc[0] == pytest.approx((model.weight - before).norm().item(), rel=1e-4)
        assert rows["step"].iloc[0] == 4


def test_a_base_class_that_fails_costs_its_own_step_only(out):
    model = torch.nn.Linear(4, 2)
    optimizer = Twice(model.parameters(), lr=0.01)
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model, optimizer) as monitor:
        train(optimizer, model, 2)
        optimizer.breaks = 1
        train(optimizer, model, 3)
        assert monitor.records(last=1)["step"].iloc[-1] == 4


def test_a_listener_to_whole_steps_is_told_once(out):
    model, told = torch.nn.Linear(4, 2), []
    optimizer = Twice(model.parameters(), lr=0.01)
    handle = after_whole_steps(lambda: told.append("step"))
    train(optimizer, model, 3)
    handle.remove()
    assert told == ["step"] * 3
