"""Writes to weights outside their optimizer's update are told at their own step, and what a loop does anyway is not."""

import pytest
import torch
from torch import nn

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import VALUE
from trainsentry.collectors.torch.parameters import weight_writes
from trainsentry.collectors.torch.parameters.gradients import OptimizedParameters
from trainsentry.collectors.torch.parameters.outside_writes import LEARNED
from trainsentry.collectors.torch.parameters.weight_writes import WeightWrites
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames

BEFORE = LEARNED + 5


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Other tests of this process compile."""
    monkeypatch.setattr(weight_writes, "has_compiled", lambda: False)


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    lambda p: torch.optim.AdamW(p, foreach=False),
    lambda p: torch.optim.AdamW(p, fused=True),
    torch.optim.Adafactor,
]


class Loop:
    """Trains four layers, and writes between the updates what a test asks for."""

    def __init__(self, make):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.optimizer = make(list(self.model.parameters()))
        self.table = SeriesTable()
        self.rows = StepRows(self.table, 0.0)
        self.writes, names = WeightWrites(self.rows, self.model.parameters), ModelNames()
        names.add([self.model], [self.optimizer])
        self.optimized = OptimizedParameters(names, {})

    def step(self, write=lambda _: None):
        """Train a step, after a write; return what was told."""
        with torch.no_grad():
            write(self.model)
        self.model(torch.randn(3, 4)).square().mean().backward()
        self.writes.begin(self.optimizer, self.optimized.owned("", self.optimizer))
        self.optimizer.step()
        self.writes.updated(self.optimizer)
        self.optimizer.zero_grad()
        taken = self.rows.take()
        return {self.table.series[i].name: float(v[VALUE]) for i, v in zip(taken.ids, taken.values, strict=True)}


def one(model):
    model[1].weight.mul_(1.5)


def every(model):
    model.load_state_dict({name: 2 * p for name, p in model.state_dict().items()})


def through_data(model):
    model[1].weight.data.mul_(1.5)


@pytest.mark.parametrize(
    ("write", "told"),
    [(one, {"outside_writes.1.weight": 1.0}), (every, {"outside_writes": 8.0}), (through_data, {})],
)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_what_was_written_is_told_once_at_its_own_step(make, write, told):
    loop = Loop(make)
    assert not any(loop.step() for _ in range(BEFORE))
    assert loop.step(write) == told
    assert not any(loop.step(write if i % 5 == 4 else lambda _: None) for i in range(20))


@pytest.mark.parametrize("period", [1, 7])
def test_what_a_loop_writes_from_the_beginning_is_its_own(period):
    loop = Loop(OPTIMIZERS[0])
    assert not any(loop.step(one if i % period == 0 else lambda _: None) for i in range(3 * BEFORE))
    assert loop.step(lambda model: [one(model), one(model)]) == {"outside_writes.1.weight": 1.0}


def test_weights_that_come_into_use_are_written_by_their_optimizer():
    loop = Loop(OPTIMIZERS[0])
    loop.model[0].requires_grad_(False)
    assert not any(loop.step() for _ in range(BEFORE))
    loop.model[0].requires_grad_(True)
    assert not any(loop.step() for _ in range(10))


def test_a_state_that_is_loaded_into_the_optimizer_writes_no_weight():
    loop = Loop(OPTIMIZERS[2])
    assert not any(loop.step() for _ in range(BEFORE))
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    assert not any(loop.step() for _ in range(3))
