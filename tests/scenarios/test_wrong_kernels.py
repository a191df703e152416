"""A kernel whose backward pass computes other gradients of the right size is named, in real trainings."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from two_families import FAMILIES, FAULT, train

from trainsentry.collectors.torch.hooks import activations

STEPS = FAULT + 40


@pytest.fixture(autouse=True)
def no_compiled_backward(monkeypatch):
    """Another test of this process may have compiled one, after which nothing is looked at."""
    monkeypatch.setattr(activations, "backward_is_compiled", lambda: False)


class _Linear(torch.autograd.Function):
    """A linear layer that takes a quarter of the tokens in another order in the gradient of its weight."""

    @staticmethod
    def forward(ctx, x, weight, bias, owner):
        ctx.save_for_backward(x, weight)
        ctx.owner = owner
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        rows, given = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
        kept = torch.cat([rows[:72], rows[72:].flip(0)]) if ctx.owner.is_wrong else rows
        return g @ weight, kept.t() @ given, rows.sum(0), None


class Linear(nn.Linear):
    is_wrong = False

    def forward(self, x):
        return _Linear.apply(x, self.weight, self.bias, self)


class _Rectifier(torch.autograd.Function):
    """A rectifier that has the mask of other samples in its backward pass."""

    @staticmethod
    def forward(ctx, x, owner):
        ctx.save_for_backward(x > 0)
        ctx.owner = owner
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g * (mask.flip(0) if ctx.owner.is_wrong else mask), None


class Rectifier(nn.Module):
    is_wrong = False

    def forward(self, x):
        return _Rectifier.apply(x, self)


def with_own_kernels(family):
    """Return how to make a model of a family with a layer of its own, and that layer's name."""
    plain = FAMILIES[family][0]

    def make():
        model = plain()
        if family == "gpt":
            model.head = Linear(16, 32)
        else:
            model.body[2] = Rectifier()
        return model

    return make


NAMES = {"gpt": ("head.weight", "gradient"), "resnet": ("body.2.input.0", "activation_grad_input")}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("breaks", [True, False])
def test_a_wrong_backward_pass_is_the_first_suspect(tmp_path, monkeypatch, family, breaks):
    def harm(model, _stepper, step):
        if breaks and step == FAULT - 1:
            (model.head if family == "gpt" else model.body[2]).is_wrong = True

    monkeypatch.setitem(FAMILIES, family, (with_own_kernels(family), *FAMILIES[family][1:]))
    found = train(tmp_path, family, collect="everything", harm=harm, steps=STEPS)
    assert len(found) == breaks
    if breaks:
        assert (found[0].name, found[0].quantity) == NAMES[family]
        assert found[0].step >= FAULT
        assert any("no longer fits the module's output" in suspect.evidence for suspect in found[0].suspects)
