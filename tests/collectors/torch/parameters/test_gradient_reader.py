"""Gradients that an optimizer takes are read once each, and nothing of Python runs for a single parameter."""

import sys

import pytest
import torch
from torch import nn

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.torch.parameters import weight_writes
from trainsentry.collectors.torch.parameters.gradient_reader import GradientReader
from trainsentry.collectors.torch.parameters.gradients import OptimizedParameters
from trainsentry.collectors.torch.parameters.weight_writes import WeightWrites
from trainsentry.collectors.torch.rows.described_tensors import compiled_read
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Other tests of this process compile."""
    monkeypatch.setattr(weight_writes, "has_compiled", lambda: False)


class Loop:
    """A model with an optimizer, its gradients and its writes as a step reads them."""

    def __init__(self, layers=3, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.table = SeriesTable()
        self.rows = StepRows(self.table, 0.0)
        names = ModelNames()
        names.add([self.model], [self.optimizer])
        self.owned = OptimizedParameters(names, {}).owned("", self.optimizer)
        self.reader = GradientReader(self.rows)
        self.writes = WeightWrites(self.rows, self.model.parameters)

    def backward(self):
        self.model(torch.ones(2, 4)).sum().backward()

    def take(self, micro_step=0):
        """Read the gradients that the optimizer takes; return their names."""
        self.reader.read_taken(self.owned, micro_step, None)
        return [self.table.series[i].name for i in self.rows.take().ids]

    @property
    def names(self):
        return [named.name for named in self.owned]


def test_a_gradient_that_was_taken_before_is_stale_until_it_is_written():
    loop = Loop()
    loop.backward()
    assert loop.take() == loop.names
    assert loop.take() == []
    loop.model[1].weight.grad.mul_(2)
    assert loop.take() == ["1.weight"]
    loop.backward()  # adds to the same tensors
    assert loop.take() == loop.names
    loop.optimizer.zero_grad()
    loop.backward()
    assert loop.take() == loop.names


def test_a_parameter_without_a_gradient_leaves_the_others_as_they_are():
    loop = Loop()
    loop.model[0].requires_grad_(False)
    for _ in range(3):
        loop.optimizer.zero_grad()
        loop.backward()
        assert loop.take() == [n for n in loop.names if not n.startswith("0.")]
        assert loop.take() == []


def test_a_wrapper_keeps_the_gradient_elsewhere():
    loop = Loop()
    for p in loop.model.parameters():
        p.main_grad = torch.ones_like(p)
    assert loop.take() == loop.names
    assert loop.take() == []


def test_the_update_of_each_micro_step_has_rows_of_its_own():
    loop = Loop()
    for micro_step in (0, 1, 0):
        loop.optimizer.zero_grad()
        loop.backward()
        loop.reader.read_taken(loop.owned, micro_step, None)
        assert {loop.table.series[i].micro_step for i in loop.rows.take().ids} == {micro_step}


def calls_of_a_step(layers, **options):
    """Return the Python calls in a step that reads gradients and notes writes, as the fifth one does."""
    loop, calls = Loop(layers, **options), 0

    def note(_frame, event, _arg):
        nonlocal calls
        calls += event == "call"

    for step in range(6):
        loop.optimizer.zero_grad()
        loop.backward()
        sys.setprofile(note if step == 5 else None)
        loop.reader.read_taken(loop.owned, 0, None)
        loop.writes.begin(loop.optimizer, loop.owned)
        sys.setprofile(None)
        loop.optimizer.step()
        sys.setprofile(note if step == 5 else None)
        loop.writes.updated(loop.optimizer)
        sys.setprofile(None)
        assert len(loop.rows.take().ids) == 2 * layers
    return calls


@pytest.mark.skipif(compiled_read is None, reason="no compiler, or a torch without DLPack's C functions")
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_the_calls_of_a_step_do_not_grow_with_the_parameters(options):
    assert calls_of_a_step(40, **options) == calls_of_a_step(4, **options)
