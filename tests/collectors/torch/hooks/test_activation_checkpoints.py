"""Inside activation checkpoints, gradients equal those of the same model without checkpoints, or are left out."""

import threading

import pytest
import torch
from tiny_models import EVERY_STEP
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainsentry

GRADIENTS = ["activation_grad_output", "activation_grad_input"]


def through(kind, function, x):
    """Run a function inside a checkpoint: reentrant, not, or none at all."""
    return function(x) if kind is None else checkpoint(function, x, use_reentrant=kind)


class Layers(nn.Module):
    """Layers in checkpoints of some kind; subclasses say how they are called."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last, self.outer, self.inner = (nn.Linear(8, 8) for _ in range(4))
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())


class Plain(Layers):
    def forward(self, x):
        return self.last(through(self.kind, self.block, self.first(x)))


class Nested(Layers):
    def forward(self, x):
        inside = lambda y: self.outer(through(self.kind, self.inner, through(self.kind, self.block, y)))  # noqa: E731
        return self.last(through(self.kind, inside, self.first(x)))


class Mixed(Layers):
    """A checkpoint that is not reentrant inside one that is."""

    def forward(self, x):
        kind = None if self.kind is None else False
        inside = lambda y: self.outer(through(kind, self.inner, y))  # noqa: E731
        return self.last(through(self.kind, inside, self.first(x)))


class Twice(Layers):
    """Modules that are called several times in a pass: within a checkpoint, and in several."""

    def forward(self, x):
        x = through(self.kind, lambda y: self.inner(self.inner(y)), self.first(x))
        for _ in range(2):
            x = through(self.kind, lambda y: self.outer(self.inner(y)), x)
        return self.last(x)


class Teacher(Layers):
    """A module whose own earlier output, without a graph, is what it is to come near to."""

    def forward(self, x):
        with torch.no_grad():
            aim = self.block(x)
        return self.last(through(self.kind, self.block, self.first(x))) - aim


def batches(count):
    return [torch.randn(2, 8, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def one_by_one(model):
    for x in batches(3):
        model(x).sum().backward()


def as_in_a_pipeline(model):
    for loss in [model(x).sum() for x in batches(3)]:
        loss.backward()


def in_reverse(model):
    for loss in reversed([model(x).sum() for x in batches(3)]):
        loss.backward()


def in_one_backward_pass(model):
    a, b = batches(2)
    (model(a).sum() + 100 * model(b).sum()).backward()


def with_a_pass_that_comes_to_nothing(model):
    for i, x in enumerate(batches(4)):
        loss = model(x).sum()
        if i != 1:
            loss.backward()


def back_twice(model):
    for x in batches(2):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()


def in_another_thread(model):
    """As on an accelerator, where the backward pass runs in a thread of autograd's own."""
    for loss in [model(x).sum() for x in batches(3)]:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()


WAYS = [one_by_one, as_in_a_pipeline, in_reverse, in_one_backward_pass, with_a_pass_that_comes_to_nothing, back_twice,
        in_another_thread]  # fmt: skip


def table_of(cls, kind, out, ways=WAYS):
    """Return the norms of all rows, of a step trained in each way."""
    torch.manual_seed(3)
    model = cls(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True, "collect": EVERY_STEP}) as monitor:
        monitor.watch(model, optimizer)
        for way in ways:
            optimizer.zero_grad()
            way(model)
            optimizer.step()
        table = monitor.records()
    table = table[~table["name"].str.startswith(("recomputed_gradient.", "euler_gap."))].copy()  # its node runs once
    table["way"] = [ways[step].__name__ for step in table["step"]]
    return table.set_index(["way", "micro_step", "name", "quantity"])["norm"].sort_index()


@pytest.mark.parametrize("kind", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("cls", [Plain, Nested, Mixed, Twice, Teacher])
def test_rows_are_those_of_the_model_without_checkpoints(out, cls, kind):
    without, inside = (table_of(cls, k, out / str(k)) for k in (None, kind))
    assert without.index.get_level_values("quantity").isin(GRADIENTS).sum() > 20 * len(WAYS)
    assert list(inside.index) == list(without.index)
    assert inside.to_numpy() == pytest.approx(without.to_numpy(), rel=1e-4, nan_ok=True)


def test_calls_beyond_those_that_are_recorded_shift_no_other(out):
    class Often(Layers):
        def forward(self, x):
            x = self.first(x)
            for _ in range(20):
                x = through(self.kind, self.inner, x)
            return x

    without, inside = (table_of(Often, k, out / str(k), [as_in_a_pipeline]) for k in (None, True))
    assert list(inside.index) == list(without.index)
    assert inside.to_numpy() == pytest.approx(without.to_numpy(), rel=1e-4, nan_ok=True)
