"""A forward pass is listed by module from the graph that is there anyway, and nothing of it is computed for that."""

import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainsentry.collectors.torch.operations import node_constants, pass_operations
from trainsentry.collectors.torch.operations.pass_operations import PassOperations

reads_tensors = pytest.mark.skipif(not node_constants.TELLS_HOOKS, reason="this torch does not tell of their hooks")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.out(((q @ k.mT) * 0.25).masked_fill(mask, -torch.inf).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), nn.Sequential(nn.Linear(8, 16), nn.GELU("tanh"), nn.Linear(16, 8))

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


def listed(model, *inputs):
    """Return the operations of a pass through a model, by module."""
    listing = PassOperations()
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: listing.enter(name)))
        handles.append(module.register_forward_hook(lambda _m, _a, _o: (listing.leave(), None)[1]))
    listing.begin()
    output = model(*inputs)
    for handle in handles:
        handle.remove()
    return listing.read([output])


def short(operations):
    return [operation.name.partition("Backward")[0] for operation in operations]


@reads_tensors
def test_each_operation_belongs_to_the_innermost_module_with_its_sources_and_constants():
    found = listed(Block(), torch.randn(2, 5, 8))
    assert [(o.name, o.sources) for o in found[""]] == [
        ("AddBackward0", ("-", "attention")),
        ("AddBackward0", (-1, "mlp")),
    ]
    [gelu] = found["mlp.1"]
    assert (gelu.sources, gelu.arguments) == (("input",), (("approximate", "tanh"),))
    constants = {o.name: dict(o.arguments) for o in found["attention"]}
    assert constants["MulBackward0"] == {"other": 0.25}
    assert constants["MaskedFillBackward0"] == {"mask": (5, 5, 10, 90)}
    assert constants["SoftmaxBackward0"] == {"dim": -1}
    assert found["mlp"] == [], "its operations are its modules'"


def test_a_convolutional_net_is_listed_with_strides_and_epsilon():
    found = listed(nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4, eps=1e-3)), torch.randn(2, 3, 8, 8))
    assert dict(found["0"][0].arguments)["stride"] == (2, 2)
    assert dict(found["1"][-1].arguments)["eps"] == 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_left_out_is_not_computed_again(reentrant):
    calls = []

    class Checkpointed(nn.Module):
        def forward(self, x):
            def inner(y):
                calls.append(1)
                return (y * torch.tensor(0.5)).masked_fill(torch.ones(4, dtype=torch.bool), 0.0) * 3.0

            return checkpoint(inner, x, use_reentrant=reentrant)

    found = listed(Checkpointed(), torch.randn(2, 4, requires_grad=True))
    assert calls == [1]
    kept = {key for operation in found[""] for key, _ in operation.arguments}
    assert "mask" not in kept


def test_saved_tensors_that_hooks_have_packed_are_not_unpacked():
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: unpacked.append(x) or x):
        listed(Block(), torch.randn(2, 5, 8))
    assert unpacked == []


@reads_tensors
def test_listing_a_pass_runs_no_operation_and_keeps_no_graph():
    model, listing = Block(), PassOperations()
    listing.begin()
    listing.enter("")
    output = model(torch.randn(2, 5, 8))
    listing.leave()
    with torch.autograd.profiler.profile() as profiled:
        assert listing.read([output]) is not None
    assert [event.name for event in profiled.function_events] == []
    graph = weakref.ref(output)
    del output
    assert graph() is None


def test_a_pass_that_raised_does_not_spoil_the_next_one():
    model, listing = Block(), PassOperations()
    for raises in (True, False):
        listing.begin()
        listing.enter("")
        listing.enter("mlp")
        if raises:
            continue
        output = model(torch.randn(2, 5, 8))
        listing.leave()
        assert listing.leave()
        assert short(listing.read([output])["mlp"])[-1] == "Add"


def test_other_threads_and_passes_without_end_are_left_out(monkeypatch):
    listing = PassOperations()
    listing.begin()
    listing.enter("")
    replica = threading.Thread(target=listing.enter, args=("replica",))
    replica.start()
    replica.join()
    assert not listing.leave(), "its nodes have numbers of their own"
    monkeypatch.setattr(pass_operations, "MOST_OPERATIONS", 10)
    assert listed(Block(), torch.randn(2, 5, 8)) is None


@reads_tensors
def test_a_mask_that_is_added_is_known_by_its_finite_elements():
    class Added(nn.Module):
        def forward(self, x):
            mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -torch.inf)
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    arguments = [dict(o.arguments) for o in listed(Added(), torch.randn(1, 2, 4, 8, requires_grad=True))[""]]
    assert [a["attn_mask"] for a in arguments if "attn_mask" in a] == [(4, 4, 10, 0.0, 0.0)]


def test_two_ways_to_the_same_numbers_are_told_apart():
    class Gated(nn.Module):
        def __init__(self, swapped):
            super().__init__()
            self.gate, self.up, self.swapped = nn.Linear(4, 4), nn.Linear(4, 4), swapped

        def forward(self, x):
            a, b = self.gate(x), self.up(x)
            return F.silu(b) * a if self.swapped else F.silu(a) * b

    first, second = (listed(Gated(swapped), torch.randn(2, 4))[""] for swapped in (False, True))
    assert short(first) == short(second) == ["Silu", "Mul"]
    assert [o.sources for o in first] == [("gate",), (-1, "up")]
    assert [o.sources for o in second] == [("up",), (-1, "gate")]
