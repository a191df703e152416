"""A kind of sharding that the package does not know is recorded once it is registered: one object, one call."""

import pandas as pd
import pytest
import torch
from torch import nn

import trainsentry
from trainsentry.collectors.torch.sharding import registry
from trainsentry.collectors.torch.sharding.local_shards import Fragment, LocalShard
from trainsentry.collectors.torch.sharding.sharding import Sharding

SCALE = 8.0


class HalfOwner(nn.Module):
    """Wraps a model for one of two ranks: this rank updates the first half of each parameter, in one flat copy."""

    def __init__(self, user_model):
        super().__init__()
        self.user_model = user_model

    def forward(self, x):
        return self.user_model(x)


class FlatSgd:
    """SGD over the flat copy; it writes its half back, and leaves out a step whose gradients are not finite."""

    def __init__(self, model, lr):
        self.parameters = list(model.parameters())
        self.halves = [p.numel() // 2 for p in self.parameters]
        flat = torch.cat([p.detach().reshape(-1)[:n] for p, n in zip(self.parameters, self.halves, strict=True)])
        self.flat = nn.Parameter(flat)
        self.optimizer = torch.optim.SGD([self.flat], lr=lr)

    def step(self):
        halves = [p.grad.reshape(-1)[:n] for p, n in zip(self.parameters, self.halves, strict=True)]
        self.flat.grad = torch.cat(halves) / SCALE
        if not self.flat.grad.isfinite().all():
            return
        self.optimizer.step()
        start = 0
        for parameter, n in zip(self.parameters, self.halves, strict=True):
            parameter.data.reshape(-1)[:n] = self.flat.data[start : start + n]
            start += n


class Halves(Sharding):
    """What the collectors have to know of it."""

    name = "halves"
    holders = frozenset({"HalfOwner"})
    library = HalfOwner.__module__.partition(".")[0]
    held_as = "user_model"
    before_reduction = "on_owner"

    def local_shards(self, model, outer):
        found = {}
        for each in outer:
            start = 0
            for parameter, n in zip(each.optimizer.parameters, each.optimizer.halves, strict=True):
                fragment = Fragment(start, n, 0, tuple(parameter.shape))
                found[id(parameter)] = (LocalShard(each.optimizer.flat, fragment, owner=parameter),)
                start += n
        return found

    def inner_optimizer(self, optimizer):
        return optimizer.optimizer if isinstance(optimizer, FlatSgd) else None

    def loss_scale(self, optimizer):
        return SCALE

    def adapts_loss_scale(self, optimizer):
        return True


@pytest.fixture
def halves():
    kind = Halves()
    registry.register_sharding(kind)
    yield kind
    registry.unregister_sharding(kind)


def rows_of(out, quantity):
    return pd.read_csv(out / "rank0" / f"{quantity}_0-999.csv").set_index(["name", "step"])


def test_a_toy_sharding_from_outside_the_package_is_recorded_like_those_inside(halves, out):
    torch.manual_seed(0)
    model = HalfOwner(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    optimizer = FlatSgd(model, lr=0.1)
    config = {
        "output_dir": str(out),
        "collect": {"gradients": {"before_reduction": True}, "parameters": {"every": 1}, "updates": {"every": 1}},
    }
    weights, gradients = [], []
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(4):
            x = torch.full((2, 4), float("inf")) if step == 2 else torch.randn(2, 4)
            for parameter in model.parameters():
                parameter.grad = None
            (model(x).sum() * SCALE).backward()
            gradients.append(model.user_model[0].weight.grad.clone())
            weights.append(model.user_model[0].weight.detach().reshape(-1)[:8].clone())
            optimizer.step()
        frame = monitor.records()
    assert set(frame[frame.quantity == "parameter"].name) == {"0.weight", "0.bias"}, "the names of the user's model"
    parameter, gradient = rows_of(out, "parameter"), rows_of(out, "gradient")
    before = rows_of(out, "gradient_unreduced")
    for step in (0, 1, 3):
        assert parameter.loc[("0.weight", step), "norm"] == pytest.approx(float(weights[step].norm()))
        half = gradients[step].reshape(-1)[:8] / SCALE
        assert gradient.loc[("0.weight", step), "norm"] == pytest.approx(float(half.norm()))
        whole = float(gradients[step].norm()) / SCALE
        assert before.loc[("0.weight", step), "norm"] == pytest.approx(whole), "the micro-batch's own, unscaled"
    assert "2" not in {str(step) for step in rows_of(out, "update").reset_index().step}, "a step that was left out"
    assert set(frame[frame.step == 2].name) >= {"skipped"}, "by the search for a loss scale"


def test_a_name_that_is_taken_is_refused_and_says_which_are(halves):
    with pytest.raises(ValueError, match=r"'halves' is registered; allowed: any name except halves, DeepSpeed"):
        registry.register_sharding(Halves())


def test_without_it_the_same_optimizer_is_refused():
    model = HalfOwner(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="FlatSgd"):
        trainsentry.TrainMonitor({}).watch(model, FlatSgd(model, 0.1))


def test_gradients_that_accumulate_are_read_as_running_sums(out, monkeypatch):
    kind = Halves()
    kind.before_reduction = "accumulated"
    registry.register_sharding(kind)
    try:
        model = HalfOwner(nn.Linear(4, 4))
        config = {"output_dir": str(out), "strict": True, "collect": {"gradients": {"before_reduction": True}}}
        optimizer = FlatSgd(model, lr=0.1)
        with trainsentry.TrainMonitor(config).watch(model, optimizer):
            for _ in range(2):
                model.zero_grad()
                for _ in range(2):  # two micro-steps
                    (model(torch.ones(2, 4)).sum() * SCALE).backward()
                whole = float(model.user_model.weight.grad.norm()) / SCALE
                optimizer.step()
    finally:
        registry.unregister_sharding(kind)
    rows = pd.read_csv(out / "rank0" / "gradient_unreduced_0-999.csv")
    assert set(rows.holds) == {"running_sum"}
    last = rows[(rows.name == "weight") & (rows.step == 1) & (rows.micro_step == 1)]
    assert float(last.norm.iloc[0]) == pytest.approx(whole)
