"""A pass that comes again is recognised, and one that differs in anything is listed anew."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from trainsentry.collectors.torch.operations.pass_operations import NUMBERS_NODES, PassOperations

pytestmark = pytest.mark.skipif(not NUMBERS_NODES, reason="this torch does not number the nodes")

WAYS = {
    "scale": 0.5,
    "swapped": False,
    "halves": False,
    "unused": False,
    "cast": False,
    "masked": 1,
    "twice": False,
    "frozen": False,
    "custom": 0,
    "gelu": "none",
    "inside": False,
}
OTHERWISE = {
    "scale": 0.25,
    "swapped": True,
    "halves": True,
    "unused": True,
    "cast": True,
    "masked": 2,
    "twice": True,
    "frozen": True,
    "custom": 1,
    "gelu": "tanh",
    "inside": True,
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


class Net(nn.Module):
    """Does each thing in one of two ways."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(4, 8), nn.Linear(4, 4), nn.ReLU()
        self.ways = dict(WAYS)

    def forward(self, x):
        ways = self.ways
        self.first.weight.requires_grad_(not ways["frozen"])
        left, right = self.first(x).chunk(2, -1)
        if ways["halves"]:
            left, right = right, left
        if ways["unused"]:
            self.second(right)
        if ways["cast"]:
            left = left.half().float()
        mask = torch.ones(4, 4, dtype=torch.bool).triu(ways["masked"])
        scores = (left @ right.mT * ways["scale"]).masked_fill(mask, -1.0)
        out = scores - right if not ways["swapped"] else right - scores
        out = (Tripled if ways["custom"] else Doubled).apply(F.gelu(out, approximate=ways["gelu"]))
        out = self.relu(out) if ways["inside"] else F.relu(out)
        return self.second(self.second(out)) if ways["twice"] else self.second(out)


def walked(model, x, listing):
    """Run a pass; return its output as `listing` has noted it."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: listing.enter(name)))
        handles.append(module.register_forward_hook(lambda _m, _a, _o: (listing.leave(), None)[1]))
    listing.begin()
    output = model(x)
    for handle in handles:
        handle.remove()
    return output


def test_the_third_pass_of_a_kind_is_known_and_so_are_all_that_follow():
    model, listing = Net(), PassOperations()
    found = [listing.read([walked(model, torch.randn(4, 4), listing)]) for _ in range(5)]
    assert all(each == found[0] for each in found)
    assert found[2] is found[3] is found[4] is found[1]
    assert found[0] is not found[1], "nothing is kept of a pass that comes once"


@pytest.mark.parametrize("way", WAYS)
def test_whatever_differs_is_seen_and_what_was_before_too(way):
    torch.manual_seed(0)
    model, listing = Net(), PassOperations()
    for value in (WAYS, OTHERWISE, WAYS):
        model.ways[way] = value[way]
        for _ in range(4):
            output, fresh = walked(model, torch.randn(4, 4), listing), PassOperations()
            found, casts = listing.read([output]), listing.casts
            again = walked(model, torch.randn(4, 4), fresh)
            assert found == fresh.read([again])
            assert casts == fresh.casts


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(list(WAYS)), min_size=1, max_size=12))
def test_passes_in_any_order_are_listed_as_if_each_were_the_first(switched):
    torch.manual_seed(0)
    model, listing = Net(), PassOperations()
    for way in ("none", *switched):
        if way in WAYS:
            model.ways[way] = OTHERWISE[way] if model.ways[way] == WAYS[way] else WAYS[way]
        for _ in range(3):
            x, fresh = torch.randn(4, 4), PassOperations()
            found = listing.read([walked(model, x, listing)])
            assert found == fresh.read([walked(model, x, fresh)])
            assert listing.casts == fresh.casts


def test_a_cast_before_the_pass_is_followed_each_time():
    model, listing = nn.Linear(4, 4), PassOperations()
    weight = torch.randn(4, 4, requires_grad=True)

    class Given(nn.Module):
        def forward(self, x):
            return F.linear(x, weights[-1])

    weights = [weight.half().float()]
    found = []
    for _ in range(4):
        found.append(listing.read([walked(Given(), model(torch.randn(2, 4)), listing)]))
        weights.append(weight * 1.0 if len(weights) > 2 else weight.half().float())
    fresh = PassOperations()
    assert found[-1] == fresh.read([walked(Given(), model(torch.randn(2, 4)), fresh)])


def test_no_graph_is_kept():
    model, listing = Net(), PassOperations()
    for _ in range(4):
        x = torch.randn(4, 4)
        output = walked(model, x, listing)
        listing.read([output])
        saved = weakref.ref(x)  # by the first operation, until its node is gone
        del x
        assert saved() is not None
        del output
        gc.collect()
        assert saved() is None
