"""A model of blocks, several ways to compile it, and a check that watching it changes nothing."""

import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import trainsentry

needs_a_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")


class Block(nn.Module):
    """A residual block with an activation in place."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.fc, self.act = nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.act(self.fc(self.norm(x)))


class Net(nn.Module):
    """A few blocks and a head; checkpointed, or with a graph break after each block."""

    def __init__(self, blocks=2, *, checkpointed=False, broken=False):
        super().__init__()
        self.broken = broken
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head, self.checkpointed = nn.Linear(8, 4), checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            if self.broken:
                torch._dynamo.graph_break()
        return self.head(x)


def whole(**options):
    """Compile the model."""
    return lambda model: torch.compile(model, **options)


def each_block(**options):
    """Compile each block in its place."""

    def compiler(model):
        for block in model.blocks:
            block.compile(**options)
        return model

    return compiler


def each_block_replaced(**options):
    """Put a compiled module in the place of each block."""

    def compiler(model):
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, **options)
        return model

    return compiler


def loss_function(**options):
    """Compile a function that calls the model."""

    def compiler(model):
        def forward(x):
            return model(x)

        return torch.compile(forward, **options)

    return compiler


SAME = (6,) * 8


def train(model, forward, optimizer, sizes):
    """Train on batches of these sizes; return losses, weights, and the number of graphs after each step."""
    generator = torch.Generator().manual_seed(1)
    losses, graphs = [], []
    for size in sizes:
        loss = forward(torch.randn(size, 8, generator=generator)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, [p.detach().clone() for p in model.parameters()], graphs


def run(out, compiler, sizes, *, blocks=2, collect=None, **kind):
    """Train, watched where `out` is given, and on for a while unwatched."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Net(blocks, **kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if out is None:
        forward = compiler(model)
        return (train(model, forward, optimizer, sizes), train(model, forward, optimizer, sizes)), None
    collect = collect or {"activations": {"every": 2}, "gradients": {"every": 1}}
    config = {"output_dir": str(out), "collect": collect, "on_incident": False, "strict": True}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        forward = compiler(model)
        watched = train(model, forward, optimizer, sizes)
        records = monitor.records()
    return (watched, train(model, forward, optimizer, sizes)), records


def assert_unharmed(tmp_path, compiler, sizes, **kwargs):
    """Same bits while watched and after, no more breaks, two graphs for one, none that comes late or at the end."""
    bare, _ = run(None, compiler, sizes, **kwargs)
    breaks = dict(counters["graph_break"])
    watched, records = run(tmp_path, compiler, sizes, **kwargs)
    assert dict(counters["graph_break"]) == breaks
    for (losses, weights, _), (bare_losses, bare_weights, _) in zip(watched, bare, strict=True):
        assert losses == bare_losses
        assert all(torch.equal(a, b) for a, b in zip(weights, bare_weights, strict=True))
    (_, _, during), (_, _, after) = watched
    assert during[-1] <= 2 * bare[0][2][-1]
    assert len(set(during[2 * (len(set(sizes)) + 1) :])) == 1  # each size has been sampled and not sampled by then
    assert set(after) == {during[-1]}
    return records
