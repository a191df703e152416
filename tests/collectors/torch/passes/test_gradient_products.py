"""Euler's identity parts right gradients from wrong ones of the same size, and looking at it changes nothing."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import trainsentry
from trainsentry.anomaly.rules.gradients.euler_gap import BROKEN, HOLDS
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.statistics import VALUE
from trainsentry.collectors.torch.hooks import activations
from trainsentry.collectors.torch.passes import gradient_products, inner_products, operation_nodes
from trainsentry.collectors.torch.passes.gradient_products import GradientProducts
from trainsentry.collectors.torch.rows.step_rows import StepRows


@pytest.fixture(autouse=True)
def no_compiled_backward(monkeypatch):
    """Another test of this process may have compiled one, after which nothing is looked at."""
    monkeypatch.setattr(activations, "backward_is_compiled", lambda: False)


def gaps_of(module, *given, write=lambda given, output: None, autocast=False):
    """Return the gaps of one pass through a module, by their sides."""
    rows, named = StepRows(SeriesTable()), NamedModule("m", module, 0)
    products = GradientProducts(rows, Guard(strict=True), lambda: True, enabled=True)
    products.choose_among([named])
    products.open_step(sampling=True)  # nothing is looked at in the first
    products.open_step(sampling=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        products.enter(named, [("0", x) for x in given])
        output = module(*given)
        products.leave(named, output)
        loss = (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(7))).sum()
    with torch.no_grad():
        write(given[0], output)
    loss.backward()
    taken = rows.take()
    names = [rows.table.series[i].name.rpartition(".")[2] for i in taken.ids.tolist()]
    return dict(zip(names, taken.values[:, VALUE].tolist(), strict=True))


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)


TOKENS = torch.randint(0, 40, (8, 12), generator=torch.Generator().manual_seed(1))

KEPT = {
    "linear": (lambda: nn.Linear(16, 16), draw(8, 12, 16), {"weight", "input"}),
    "without bias": (lambda: nn.Linear(16, 24, bias=False), draw(32, 16), {"weight", "input"}),
    "first layer": (lambda: nn.Linear(16, 24), draw(32, 16).detach(), {"weight"}),
    "convolution": (lambda: nn.Conv2d(3, 8, 3, stride=2, groups=1), draw(4, 3, 9, 9), {"weight", "input"}),
    "depthwise": (lambda: nn.Conv1d(8, 8, 3, groups=8), draw(4, 8, 20), {"weight", "input"}),
    "upwards": (lambda: nn.ConvTranspose2d(4, 2, 2, stride=2), draw(4, 4, 5, 5), {"weight", "input"}),
    "embedding": (lambda: nn.Embedding(40, 16), TOKENS, {"weight"}),
    "layer norm": (lambda: nn.LayerNorm(16), draw(8, 12, 16), {"weight"}),
    "batch norm": (lambda: nn.BatchNorm2d(3), draw(4, 3, 9, 9), {"weight"}),
    "rectifier": (nn.ReLU, draw(8, 12, 16), {"input"}),
    "leaky": (nn.LeakyReLU, draw(8, 12, 16), {"input"}),
    "dropout": (lambda: nn.Dropout(0.3), draw(8, 12, 16), {"input"}),
    "pooling": (lambda: nn.MaxPool2d(2), draw(4, 3, 8, 8), {"input"}),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KEPT)
def test_right_gradients_keep_the_identity(kind, autocast):
    make, given, sides = KEPT[kind]
    torch.manual_seed(0)
    found = gaps_of(make(), given, autocast=autocast)
    assert set(found) == sides
    assert max(found.values()) < (HOLDS if autocast else 2e-5)


class _Kernel(torch.autograd.Function):
    """A linear layer of its own, with a fault."""

    @staticmethod
    def forward(ctx, x, weight, fault):
        ctx.save_for_backward(x, weight)
        ctx.fault = fault
        return x @ weight.t()

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        of_weight, of_input = g.t() @ x, g @ weight
        if ctx.fault == "transposed":
            of_weight = of_weight.t()
        if ctx.fault == "rows lost":
            of_input = torch.cat([of_input[:-32], torch.zeros_like(of_input[:32])])
        return of_input, of_weight, None


class _Masked(torch.autograd.Function):
    """A rectifier whose backward pass has the mask of another batch."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.save_for_backward((x.flip(0) if fault else x) > 0)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class Own(nn.Module):
    """A module with a kernel of its own."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.kernel = fault, nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        return _Kernel.apply(x, self.kernel, self.fault)


class OwnRectifier(nn.Module):
    """A rectifier with a kernel of its own."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, x):
        return _Masked.apply(x, self.fault)


@pytest.mark.parametrize(
    ("make", "fault", "wrong", "right"),
    [
        (Own, "transposed", "kernel", "input"),
        (Own, "rows lost", "input", "kernel"),
        (OwnRectifier, "flipped", "input", None),
    ],
)
def test_wrong_gradients_break_it_at_their_own_side(make, fault, wrong, right):
    torch.manual_seed(0)
    assert gaps_of(make(fault), draw(64, 16))[wrong] > BROKEN
    healthy = gaps_of(make(None), draw(64, 16))
    assert max(healthy.values()) < 2e-5
    if right is not None:
        assert gaps_of(make(fault), draw(64, 16))[right] < 2e-5


def test_what_was_overwritten_meanwhile_has_no_part_in_it():
    torch.manual_seed(0)
    given = draw(32, 16)
    layer = nn.Linear(16, 16)
    assert set(gaps_of(layer, given, write=lambda _, output: output.mul_(2))) == {"gradients"}
    assert gaps_of(nn.LayerNorm(16), given, write=lambda _, output: output.mul_(2)) == {}
    assert set(gaps_of(nn.Dropout(0.5), given, write=lambda x, _: x.mul_(2))) == set()


tells_default_hooks = pytest.mark.skipif(
    not operation_nodes.TELLS_DEFAULT_HOOKS, reason="this torch does not tell of hooks of saved tensors"
)


@tells_default_hooks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_large_outputs_the_gradients_are_compared_with_each_other(monkeypatch, dtype):
    torch.manual_seed(0)
    layer, given = nn.Linear(64, 64).to(dtype), draw(96, 64).detach().to(dtype).requires_grad_()
    whole = gaps_of(layer, given)
    monkeypatch.setattr(gradient_products, "MOST_BYTES", 1000)
    monkeypatch.setattr(inner_products, "AT_ONCE", 1000)
    found = gaps_of(layer, given)
    assert (set(whole), set(found)) == ({"weight", "input"}, {"gradients"})
    assert found["gradients"] < (HOLDS if dtype == torch.bfloat16 else 2e-5)
    assert gaps_of(nn.Dropout(0.5), given) == {}, "nothing else keeps its input"


def test_products_of_many_elements_are_those_of_few(monkeypatch):
    torch.manual_seed(0)
    a, b = torch.randn(300, 40), torch.randn(40, 300).t()
    expected, size = float((a.double() * b.double()).sum()), math.sqrt(12000)
    monkeypatch.setattr(inner_products, "AT_ONCE", 1000)
    assert float(inner_products._inner(a, b)) == pytest.approx(expected, abs=1e-5 * size)
    assert float(inner_products._inner(a.bfloat16(), b.reshape(12000))) == pytest.approx(expected, abs=5e-3 * size)


def frozen_bias():
    layer = nn.Linear(16, 16)
    layer.bias.requires_grad_(False)
    return layer


@pytest.mark.parametrize(
    "make",
    [
        frozen_bias,
        lambda: nn.Linear(16, 4, dtype=torch.float64),
        lambda: nn.GRU(16, 4),
        nn.Identity,
        nn.ReLU6,
        lambda: nn.Hardtanh(0, 20),
        nn.GELU,
    ],
)
def test_modules_of_which_too_little_is_known_are_passed_by(make):
    layer = make()
    given = torch.randn(6, 16, dtype=next(layer.parameters(), torch.zeros(1)).dtype)
    given.requires_grad_(not list(layer.parameters()) or isinstance(layer, nn.GRU))
    named = NamedModule("m", layer, 0)
    products = GradientProducts(StepRows(SeriesTable()), Guard(strict=True), lambda: True, enabled=True)
    products.choose_among([named])
    products.open_step(sampling=True)  # nothing is looked at in the first
    products.open_step(sampling=True)
    products.enter(named, [("0", given)])
    output = layer(given)
    products.leave(named, output)
    (output[0] if isinstance(output, tuple) else output * 1).sum().backward()
    assert not products.rows.take().ids.size


def test_a_module_that_gives_its_input_back_is_not_taken_for_the_one_before():
    """As a dropout that is switched off, behind a softmax."""
    before = draw(8, 12, 16).softmax(-1)
    assert gaps_of(nn.Dropout(0.0), before) == {}
    assert set(gaps_of(nn.Dropout(0.5), draw(8, 12, 16).softmax(-1))) == {"input"}


@pytest.mark.parametrize("which", [{"padding_idx": 0}, {"scale_grad_by_freq": True}])
def test_embeddings_whose_gradients_leave_something_out_are_passed_by(which):
    assert gaps_of(nn.Embedding(40, 16, **which), TOKENS) == {}


@tells_default_hooks
def test_an_input_that_autocast_copies_is_not_kept_for_nothing(monkeypatch):
    monkeypatch.setattr(gradient_products, "MOST_BYTES", 1000)
    layer, given = nn.Linear(64, 64), draw(96, 64)
    assert set(gaps_of(layer, given)) == {"gradients"}
    assert gaps_of(layer, given, autocast=True) == {}


def test_a_pass_without_a_backward_pass_keeps_no_memory():
    layer, products = (
        nn.Linear(16, 16),
        GradientProducts(StepRows(SeriesTable()), Guard(strict=True), lambda: True, enabled=True),
    )
    named = NamedModule("m", layer, 0)
    products.choose_among([named])
    products.open_step(sampling=True)  # nothing is looked at in the first
    products.open_step(sampling=True)
    given = torch.randn(4, 16)
    products.enter(named, [("0", given)])
    output = layer(given)
    products.leave(named, output)
    kept = weakref.ref(output)
    gc.disable()  # a cycle would stay
    try:
        del output
        assert kept() is None
    finally:
        gc.enable()


class Net(nn.Module):
    """A few kinds of layers; a block may be checkpointed."""

    def __init__(self, checkpoints):
        super().__init__()
        self.embedding, self.norm, self.up, self.down = (
            nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16),
        )  # fmt: skip
        self.act, self.head, self.checkpoints = nn.ReLU(inplace=True), nn.Linear(16, 40), checkpoints

    def forward(self, tokens):
        x = self.embedding(tokens)
        block = lambda h: self.down(self.act(self.up(self.norm(h))))  # noqa: E731
        x = x + (checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant") if self.checkpoints else block(x))
        return self.head(x)


def train(tmp_path, *, watched=True, checkpoints="", steps=24, every=1):
    torch.manual_seed(0)
    model = Net(checkpoints)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    collect = {"activations": {"every": every}}
    monitor = trainsentry.TrainMonitor({"output_dir": str(tmp_path), "strict": True, "collect": collect})
    if watched:
        monitor.watch(model, optimizer)
    for step in range(steps):
        tokens = torch.randint(0, 40, (4, 13), generator=torch.Generator().manual_seed(step))
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    table = monitor.records() if watched else None
    monitor.close()
    return losses, table


@pytest.mark.parametrize("checkpoints", ["", "reentrant", "not reentrant"])
def test_training_is_the_same_to_the_bit_and_every_layer_has_its_turn(tmp_path, checkpoints):
    losses, table = train(tmp_path / "a", checkpoints=checkpoints)
    assert losses == train(tmp_path / "b", checkpoints=checkpoints, watched=False)[0]
    rows = table[table["name"].str.startswith("euler_gap.")]
    inner = set() if checkpoints == "reentrant" else {"norm.weight", "up.gradients", "down.weight"}
    assert set(rows["name"].str.removeprefix("euler_gap.")) >= {"embedding.weight", "head.weight", "head.input", *inner}
    assert rows["value"].max() < 2e-5
