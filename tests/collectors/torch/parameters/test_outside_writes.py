"""Writes to weights outside their optimizer's update are told at their own step, and what a loop does anyway is not."""

import pytest
import torch
from weight_loop import WeightLoop

from trainsentry.collectors.series import LASTING_WRITES
from trainsentry.collectors.torch.parameters import weight_writes
from trainsentry.collectors.torch.parameters.outside_writes import LEARNED
from trainsentry.collectors.torch.parameters.weight_writes import LOOKS

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


def make_loop(make=OPTIMIZERS[0]):
    return WeightLoop(make, *[torch.nn.Linear(4, 4) for _ in range(4)])


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
    loop = make_loop(make)
    assert not any(loop.step() for _ in range(BEFORE))
    assert loop.step(write) == told
    assert not any(loop.step(write if i % 5 == 4 else lambda _: None) for i in range(20))


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_size_of_a_weight_that_is_written_before_many_updates_in_a_row_is_told(make):
    """As one that is pulled to its average after each update, or is held at a bound."""
    loop = make_loop(make)
    assert not any(loop.step() for _ in range(BEFORE))
    told = [loop.step(one) for _ in range(3 * LASTING_WRITES)]
    sizes = told[LASTING_WRITES - 1 : LASTING_WRITES - 1 + LOOKS]
    assert told[0] == {"outside_writes.1.weight": 1.0}
    assert all(set(t) == {"written_norm.1.weight", "written_largest.1.weight"} for t in sizes)
    assert sizes[0]["written_norm.1.weight"] > sizes[0]["written_largest.1.weight"] > 0
    assert not any(told[1 : LASTING_WRITES - 1] + told[LASTING_WRITES - 1 + LOOKS :])


def test_most_weights_that_are_written_before_each_update_are_the_loops_own():
    loop = make_loop()
    assert not any(loop.step() for _ in range(BEFORE))
    assert [loop.step(every) for _ in range(20)] == [{"outside_writes": 8.0}] + 19 * [{}]


@pytest.mark.parametrize("period", [1, 7])
def test_what_a_loop_writes_from_the_beginning_is_its_own(period):
    loop = make_loop(OPTIMIZERS[0])
    assert not any(loop.step(one if i % period == 0 else lambda _: None) for i in range(3 * BEFORE))
    assert loop.step(lambda model: [one(model), one(model)]) == {"outside_writes.1.weight": 1.0}


def test_weights_that_come_into_use_are_written_by_their_optimizer():
    loop = make_loop(OPTIMIZERS[0])
    loop.model[0].requires_grad_(False)
    assert not any(loop.step() for _ in range(BEFORE))
    loop.model[0].requires_grad_(True)
    assert not any(loop.step() for _ in range(10))


def test_a_state_that_is_loaded_into_the_optimizer_writes_no_weight():
    loop = make_loop(OPTIMIZERS[2])
    assert not any(loop.step() for _ in range(BEFORE))
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    assert not any(loop.step() for _ in range(3))
