"""A buffer that something sets beside its module is told by the count of its writes, and its values are not read."""

import pytest
import torch
from torch import nn

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import VALUE
from trainsentry.collectors.torch.parameters import buffer_writes
from trainsentry.collectors.torch.parameters.buffer_writes import LEARNED, BufferWrites
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Other tests of this process compile."""
    monkeypatch.setattr(buffer_writes, "has_compiled", lambda: False)


class RunningNorm(nn.Module):
    """Normalises observations by statistics that the loop updates, as of reinforcement learning."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        return (x - self.mean) / self.var.sqrt()

    def update(self, x):
        self.mean.lerp_(x.mean(0), 0.1)
        self.var.lerp_(x.var(0), 0.1)


class Loop:
    """A model with batch norms and a norm of its own, whose writes are counted."""

    def __init__(self):
        torch.manual_seed(0)
        self.norm, self.blocks = RunningNorm(), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.rows = StepRows(SeriesTable(), 0.0)
        model = nn.ModuleDict({"norm": self.norm, "blocks": self.blocks})
        names = ModelNames()
        names.add([model])
        self.writes = BufferWrites(self.rows, names)

    def step(self, harm=None, *, updates=1, passes=1):
        """Do what a step does; return the rows that it made."""
        for _ in range(updates):
            self.norm.update(torch.randn(8, 4))
        for _ in range(passes):
            self.blocks(self.norm(torch.randn(8, 4)))
        if harm is not None:
            harm(self)
        self.writes.read()
        taken = self.rows.take()
        names = [self.rows.table.series[i].name.removeprefix("buffer_writes.") for i in taken.ids.tolist()]
        return dict(zip(names, taken.values[:, VALUE].tolist(), strict=True))


@pytest.fixture
def loop():
    loop = Loop()
    for i in range(LEARNED + 2):
        assert loop.step(updates=2 * (i % 4 == 0), passes=1 + i % 3) == {}
    return loop


@pytest.mark.parametrize(
    ("harm", "name"),
    [
        (lambda loop: loop.blocks[2].running_var.copy_(torch.ones(4)), "blocks.2.running_var"),
        (lambda loop: loop.norm.mean.copy_(torch.ones(4)), "norm.mean"),
    ],
)
def test_a_buffer_that_is_set_beside_its_module_has_a_row_when_that_begins_and_ends(loop, harm, name):
    assert [loop.step(harm, updates=1), loop.step(harm, updates=3)] == [{name: 1.0}, {}]
    assert loop.step() == {name: 0.0}
    assert loop.step() == {}


def test_before_an_update_without_writes_nothing_is_known(loop):
    """Several updates follow one rollout."""
    harm = lambda loop: loop.norm.mean.mul_(1.0)  # noqa: E731
    assert loop.step(harm, updates=4) == {"norm.mean": 1.0}
    assert [loop.step(updates=0), loop.step(harm, updates=4), loop.step(updates=0)] == [{}, {}, {}]


@pytest.mark.parametrize(
    "harm",
    [
        lambda loop: [b.copy_(b.clone()) for b in (*loop.blocks.buffers(), *loop.norm.buffers())],  # a broadcast of all
        lambda loop: [m.running_var.fill_(1.0) for m in (loop.blocks[0], loop.blocks[2])],  # all of that name
        lambda loop: loop.norm.table.add_(1.0),  # is used for the first time
        lambda loop: loop.blocks.eval(),  # is written less often
        lambda loop: setattr(loop.norm, "mean", torch.zeros(4)),  # another tensor
        lambda loop: None,
    ],
)
def test_what_happens_to_all_alike_or_begins_or_ends_is_by_design(loop, harm):
    assert [loop.step(harm) for _ in range(3)] == [{}, {}, {}]


def test_a_module_that_is_called_no_more_says_nothing_of_its_like():
    """A head that is trained for a while, or a teacher."""
    main, aside = nn.Linear(2, 2), nn.Linear(2, 2)
    for module in (main, aside):
        module.register_buffer("calls", torch.zeros(1))
    names, table = ModelNames(), SeriesTable()
    names.add([nn.ModuleDict({"main": main, "aside": aside})], [])
    rows = StepRows(table, 0.0)
    writes = BufferWrites(rows, names)

    def told(*called):
        for module in called:
            module.calls.add_(1)
        writes.read()
        taken = rows.take()
        return {table.series[i].name: float(v[VALUE]) for i, v in zip(taken.ids, taken.values, strict=True)}

    assert not any(told(main, aside) for _ in range(LEARNED + 5))
    assert not any(told(main) for _ in range(20))
    assert told(main, main) == {"buffer_writes.main.calls": 1.0}


def test_inference_tensors_have_no_count():
    loop = Loop()
    with torch.inference_mode():
        loop.norm.table = torch.ones(4)
    assert [loop.step() for _ in range(LEARNED + 5)] == [{}] * (LEARNED + 5)


def test_a_module_that_gets_another_buffer_begins_anew_and_the_first_buffers_of_many_are_counted(loop, monkeypatch):
    harm = lambda loop: loop.norm.mean.mul_(1.0)  # noqa: E731
    loop.norm.register_buffer("late", torch.ones(4))
    assert [loop.step(harm) for _ in range(LEARNED + 3)] == [{}] * (LEARNED + 3), "so it has always been"
    monkeypatch.setattr(buffer_writes, "MOST", 1)
    loop.norm.register_buffer("later", torch.ones(4))
    for _ in range(LEARNED + 3):
        assert loop.step() == {}
    assert loop.step(lambda loop: loop.blocks[0].running_var.fill_(1.0)) == {}
    assert loop.step(harm) == {"norm.mean": 1.0}
