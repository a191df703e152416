"""Writes of gradients are counted without reading them, and micro-steps do not count."""

import pytest
import torch
from torch import nn

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import VALUE
from trainsentry.collectors.torch.parameters import gradient_writes
from trainsentry.collectors.torch.parameters.gradient_writes import GradientWrites
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Other tests of this process compile."""
    monkeypatch.setattr(gradient_writes, "has_compiled", lambda: False)


class Loop:
    """A training loop of which a step's parts can be left out or doubled."""

    def __init__(self, *, sets_to_none=True):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.rows = StepRows(SeriesTable(), 0.0)
        self.writes, self.sets_to_none = GradientWrites(self.rows, ModelNames()), sets_to_none

    def step(self, micro_steps=1, backwards=1, *, clips=True, zeroes=True, write=lambda model: None):
        """Train a step; return the count, or None where no row was made."""
        for _ in range(micro_steps):
            loss = self.model(torch.randn(3, 4)).square().mean()
            for _ in range(backwards):
                loss.backward(retain_graph=True)
        if clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with torch.no_grad():
            write(self.model)
        self.writes.read(self.optimizer, micro_steps)
        self.optimizer.step()
        if zeroes:
            self.optimizer.zero_grad(set_to_none=self.sets_to_none)
        taken = self.rows.take()
        return float(taken.values[0, VALUE]) if len(taken.ids) else None


@pytest.mark.parametrize("sets_to_none", [True, False])
def test_a_loop_that_stays_the_same_has_one_row(sets_to_none):
    loop = Loop(sets_to_none=sets_to_none)
    loop.step()
    loop.step()
    assert [loop.step(micro_steps) for micro_steps in (1, 1, 4, 2, 1, 3)] == [None] * 6


@pytest.mark.parametrize(
    ("fault", "more"),
    [({"clips": False}, -1), ({"backwards": 2}, 1), ({"micro_steps": 1}, None)],
    ids=["no longer clipped", "computed twice", "nothing"],
)
def test_what_a_loop_does_otherwise_changes_the_count(fault, more):
    loop = Loop()
    usual = loop.step()
    assert loop.step(**fault) == (None if more is None else usual + more)


@pytest.mark.parametrize("sets_to_none", [True, False])
def test_a_single_gradient_that_is_written_more_often_is_told_where_gradients_are_made_anew(sets_to_none):
    """One that is kept has all writes so far, of which nothing is known."""
    loop = Loop(sets_to_none=sets_to_none)
    loop.writes.names.add([loop.model])
    for _ in range(40):
        loop.step()
    told = [loop.step(write=lambda model: model[2].weight.grad.neg_()) for _ in range(16)]
    assert told.count(1.0) == sets_to_none
    assert (loop.rows.table.series[-1].name == "gradient_writes.0.2.weight") == sets_to_none


def test_gradients_that_are_kept_count_once_more_at_every_step():
    loop = Loop()
    usual = loop.step()
    loop.step(zeroes=False)
    assert loop.step(zeroes=False) == usual + 1
    assert loop.step(zeroes=False) is None


def test_no_gradient_and_unknown_micro_steps_make_no_row():
    loop = Loop()
    loop.writes.read(loop.optimizer, 1)
    loop.model(torch.randn(3, 4)).sum().backward()
    loop.writes.read(loop.optimizer, 0)
    assert len(loop.rows.take().ids) == 0


def test_numbers_and_bits_of_training_are_unchanged():
    def train(*, watched):
        loop = Loop()
        loop.writes.read = loop.writes.read if watched else lambda *_: None
        for micro_steps in (1, 2, 1):
            loop.step(micro_steps)
        return [p.detach().clone() for p in loop.model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(watched=True), train(watched=False), strict=True))


def test_nothing_is_counted_where_something_is_compiled(monkeypatch):
    loop = Loop()
    monkeypatch.setattr(gradient_writes, "has_compiled", lambda: True)
    assert loop.step() is None


def test_reading_takes_no_operation():
    loop = Loop()
    loop.model(torch.randn(3, 4)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        loop.writes.read(loop.optimizer, 1)
    assert [event.key for event in seen.key_averages() if event.key.startswith("aten::")] == []


@pytest.mark.parametrize("sets_to_none", [True, False])
def test_a_second_update_with_the_same_gradients_has_a_row(sets_to_none):
    loop = Loop(sets_to_none=sets_to_none)
    assert [loop.step() for _ in range(4)][2:] == [None, None]
    assert loop.step(zeroes=False) is None
    assert loop.step(micro_steps=0, clips=False) == 1.0
    assert loop.rows.table.series[-1].name == "stale_update.0"


def test_the_row_of_one_of_several_optimizers_belongs_to_the_module_that_it_trains():
    model = nn.ModuleDict({"policy": nn.Linear(4, 2), "value": nn.Sequential(nn.Linear(4, 1))})
    names, rows = ModelNames(), StepRows(SeriesTable(), 0.0)
    names.add([model])
    writes, optimizers = GradientWrites(rows, names), [torch.optim.SGD(m.parameters(), lr=0.1) for m in model.values()]
    for step in range(3):
        for optimizer, module in zip(optimizers, model.values(), strict=True):
            module(torch.randn(3, 4)).square().mean().backward()
            if step == 2:
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            writes.read(optimizer, 1)
            optimizer.zero_grad()
    series = [rows.table.series[i] for i in rows.take().ids.tolist()]
    assert [s.name[-1] + " " + s.module for s in series] == ["0 ", "1 value.0", "0 policy", "1 value.0"]
