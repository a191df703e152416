"""What a module computes has a row when it is another for good, and none while it varies, or is switched on purpose."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import (
    MOVED_ARGUMENT,
    OTHER_ARGUMENT,
    OTHER_OPERATIONS,
    PASSING,
    SeriesTable,
)
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.statistics import MIN, VALUE
from trainsentry.collectors.torch.operations import operation_changes
from trainsentry.collectors.torch.operations.node_constants import TELLS_HOOKS
from trainsentry.collectors.torch.operations.operation_changes import OperationChanges

reads_tensors = pytest.mark.skipif(not TELLS_HOOKS, reason="this torch does not tell of the hooks of saved tensors")


MASK = torch.ones(8, 8, dtype=torch.bool).triu(1)


class Rows:
    """Notes the rows of changes."""

    def __init__(self):
        self.table, self.told = SeriesTable(), []

    def add_numbers(self, series_id, numbers):
        self.told.append((self.table.series[series_id].name, numbers[MIN], numbers[VALUE]))


class Mixer(nn.Module):
    """A block whose numbers, mask and operations can be set from outside."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale, self.approximate, self.masked, self.act, self.residual = 0.25, "none", 1, F.gelu, True
        self.repeats, self.drop, self.detached, self.halves = 1, False, False, False

    def forward(self, x):
        mask = torch.ones(8, 8, dtype=torch.bool).triu(self.masked)
        y = self.inner(x) * self.scale
        y = F.gelu(y, approximate=self.approximate) if self.act is F.gelu else self.act(y)
        y = y.masked_fill(mask[: len(y)], 0.0)
        y = y.half().float() if self.halves else y
        for _ in range(self.repeats):
            y = y.tanh()
        if not self.drop:
            y = self.outer(y.detach() if self.detached else y)
        return x + y if self.residual else y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Mixer(), Mixer()

    def forward(self, x):
        return self.second(self.first(x)).sum(-1)


def changes(change, passes=60, at=40, *, rows=lambda step: 8, autocast=lambda step: False, change_net=lambda net: None):
    """Return the rows of a run in which `change(net, step)` is called before each pass from `at` on."""
    torch.manual_seed(0)
    net, told = Net(), Rows()
    change_net(net)
    watched = OperationChanges(told, Guard(), enabled=True)
    named = {module: NamedModule(name, module, 0) for name, module in net.named_modules()}
    for module in named:
        module.register_forward_pre_hook(lambda m, _a: watched.enter(named[m]))
        module.register_forward_hook(lambda _m, _a, output: watched.leave([("", output)]))
    for step in range(passes):
        if step >= at:
            change(net, step)
        x = torch.randn(rows(step), 8, requires_grad=True)
        watched.begin(named[net], [("0", x)], reading=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast(step)):
            net(x)
    return told.told


def setting(name, value):
    return lambda net, _step: setattr(net.second, name, value)


@pytest.mark.parametrize(
    ("name", "value", "text", "kind", "passes"),
    [
        ("approximate", "tanh", "approximate of gelu: none → tanh", OTHER_ARGUMENT, 2),
        pytest.param("scale", 0.5, "factor of mul: 0.25 → 0.5", OTHER_ARGUMENT, 2, marks=reads_tensors),
        pytest.param("scale", -0.25, "factor of mul: 0.25 → -0.25", OTHER_ARGUMENT, 2, marks=reads_tensors),
        pytest.param("scale", 0.26, "factor of mul: 0.25 → 0.26", MOVED_ARGUMENT, 2, marks=reads_tensors),
        pytest.param(
            "masked",
            2,
            "mask of masked_fill: 28 of 64 elements → 21 of 64 elements",
            OTHER_ARGUMENT,
            4,
            marks=reads_tensors,
        ),
        ("halves", True, "number of casts: 0 → 2", OTHER_ARGUMENT, 2),
        ("act", torch.relu, "operations: with relu, without gelu", OTHER_OPERATIONS, 2),
        ("residual", False, "operations: without add", OTHER_OPERATIONS, 4),
        ("repeats", 2, "operations: with tanh", OTHER_OPERATIONS, 4),
    ],
)
def test_another_constant_or_operation_has_a_row_until_it_has_lasted(name, value, text, kind, passes):
    told = changes(setting(name, value))
    expected = [(f"operations.second: {text}", lasted + 1, PASSING) for lasted in range(passes - 1)]
    assert told == [*expected, (f"operations.second: {text}", passes, kind)]


def test_what_a_branch_takes_from_is_part_of_what_is_computed():
    (name, _, kind) = changes(setting("detached", True))[-1]
    assert name.startswith("operations.second: operations: without ")
    assert kind == OTHER_OPERATIONS


@pytest.mark.parametrize(
    "change",
    [
        lambda net, step: setattr(net.second, "scale", 0.25 * 1.01 ** (step - 39)),
        lambda net, step: setattr(net.second, "drop", step % 7 == 5),
        lambda net, step: setattr(net.second, "act", torch.relu if step % 9 == 5 else F.gelu),
        lambda net, step: setattr(net.second, "masked", 3 if step % 8 == 5 else 1),
        lambda net, step: net.second.inner.requires_grad_(False),
        lambda net, step: [p.requires_grad_(False) for p in net.first.parameters()],
    ],
    ids=["annealed", "dropped layer", "rare branch", "rare padding", "frozen", "all of a block frozen"],
)
def test_what_programs_do_on_purpose_is_no_lasting_change(change):
    assert {kind for *_, kind in changes(change)} <= {PASSING, MOVED_ARGUMENT}


def test_other_shapes_autocast_and_modes_are_taken_as_they_are():
    def longer(net, step):
        net.second.repeats = 2 + step % 3

    assert changes(longer, rows=lambda step: 8 if step < 40 else 4 + step % 3) == []
    assert changes(lambda net, step: None, autocast=lambda step: step >= 40) == []

    def evaluated(net, step):
        net.eval()
        net.second.act = torch.relu

    assert changes(evaluated) == []


@pytest.mark.parametrize(("name", "value", "text"), [
    ("approximate", "tanh", "approximate of gelu: none → tanh"),
    ("act", torch.relu, "operations: with relu, without gelu"),
])  # fmt: skip
def test_what_no_length_changes_has_a_row_where_lengths_vary(name, value, text):
    """Batches are padded to their longest sample. Beyond all lengths before, a program may take another way."""

    def longer(net, step):
        setattr(net.second, name, value)

    told = changes(longer, rows=lambda step: 4 + step * 7 % 5)
    assert f"operations.second: {text}" in {of for of, *_ in told}
    assert changes(longer, rows=lambda step: 2 + step * 7 % 5 if step < 40 else 7 + step % 2) == []
    assert changes(longer, rows=lambda step: 4 + step // 8 % 5) == [], "too few lengths are known to have no part in it"


def test_a_kernel_that_torch_takes_for_some_lengths_is_no_change_of_the_program():
    """As of attention, for a multiple of eight: it comes for one length, or for two or three in a row."""

    def of_length(net, step):
        net.second.act = torch.relu if step in {45, 46, 47, 55} else F.gelu

    told = changes(of_length, rows=lambda step: 4 + step * 7 % 5)
    assert {kind for *_, kind in told} == {PASSING}


@reads_tensors
@pytest.mark.parametrize("rotary", [True, False])
def test_positions_that_are_off_by_one_have_a_row(rotary):
    """Rotary positions are a table by which a program multiplies; learned ones are rows of a table of weights."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.offset = nn.Embedding(20, 8), 0

        def forward(self, x):
            places = torch.arange(8) + self.offset
            return x * places[:, None].cos() if rotary else x + self.table(places)

    def later(net, step):
        net.second.outer.offset = 1

    told = changes(later, change_net=lambda net: setattr(net.second, "outer", Positions()))
    module = "second.outer" if rotary else "second.outer.table"
    what = "factor of mul" if rotary else "indices of embedding"
    assert told[-1][0].startswith(f"operations.{module}: {what}: a table with the sum ")
    assert [kind for *_, kind in told] == [PASSING, PASSING, PASSING, OTHER_ARGUMENT]


@reads_tensors
@pytest.mark.parametrize(("many", "text"), [
    (1, "indices of index: a table with the sum 28 → the same in another order"),
    (2, "a table with the sum 28 and a table with the sum 28 → the same in another order"),
], ids=["one axis", "two axes"])  # fmt: skip
def test_elements_that_are_taken_from_other_places_have_a_row(many, text):
    """A permutation changes no sum."""

    class Taken(nn.Module):
        def __init__(self):
            super().__init__()
            self.order = torch.arange(8)

        def forward(self, x):
            return x[self.order] if many == 1 else x[self.order, self.order.flip(0)]

    def rolled(net, step):
        net.second.outer.order = torch.arange(8).roll(1)

    def take(net):
        net.second.outer, net.second.residual = Taken(), False

    assert text in changes(rolled, change_net=take)[-1][0]


@reads_tensors
def test_a_mask_that_hides_other_elements_has_a_row():
    """Of as many, as where it is shifted or transposed."""

    def transposed(net, step):
        net.second.act = lambda y: y.masked_fill(MASK.T, 0.0)

    def hides(net):
        net.second.act = lambda y: y.masked_fill(MASK, 0.0)

    told = changes(transposed, change_net=hides)[-1][0]
    assert "28 of 64 elements → the same in another order" in told


def test_numbers_that_are_random_have_no_rows():
    def shaken(net, step):
        net.second.scale = random.Random(step).random()

    assert changes(shaken, at=0) == []


@reads_tensors
def test_numbers_that_varied_are_no_constant_because_some_passes_had_the_same():
    def shaken(net, step):
        net.second.scale = 0.2 if 20 <= step < 27 else random.Random(step).random()

    assert changes(shaken, at=0) == []


class Packed(Net):
    """Takes as many sequences to the end as a batch has of the greatest length."""

    longest, begins = 1, 0

    def forward(self, x):
        return self.second(self.first(x)[: self.longest, self.begins :]).sum()


@pytest.mark.parametrize(("alike", "is_told"), [(8, False), (40, True)])
def test_a_size_of_the_data_is_no_constant_after_a_few_passes_alike(monkeypatch, alike, is_told):
    monkeypatch.setattr(f"{__name__}.Net", Packed)
    monkeypatch.setattr(Mixer, "forward", lambda self, x: self.inner(x))

    def batches(net, step):
        net.longest = 1 if step < alike else 4

    assert bool(changes(batches, passes=alike + 8, at=0)) == is_told


def test_a_young_run_has_no_rows():
    assert changes(setting("act", torch.relu), at=4) == []
    assert changes(setting("residual", False), at=7) == []


def test_the_number_of_rows_is_bounded(monkeypatch):
    monkeypatch.setattr(operation_changes, "MOST_TOLD", 1)
    assert len(changes(setting("act", torch.relu))) == 1


def test_passes_that_are_too_large_are_soon_read_no_more(monkeypatch):
    """To find that out walks through twenty thousand nodes of the graph."""
    read = []
    monkeypatch.setattr(operation_changes.PassOperations, "read", lambda _self, _outputs: read.append(1))
    assert changes(setting("act", torch.relu)) == []
    assert len(read) == operation_changes.MOST_TOO_LARGE


def test_single_passes_that_are_too_large_end_nothing(monkeypatch):
    read, number = operation_changes.PassOperations.read, iter(range(100))
    monkeypatch.setattr(
        operation_changes.PassOperations,
        "read",
        lambda self, outputs: read(self, outputs) if next(number) % 3 else None,
    )
    assert len(changes(setting("act", torch.relu))) == 2
