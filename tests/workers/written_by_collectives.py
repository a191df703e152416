"""Models whose collectives write activations and gradients in place, as Megatron's tensor parallelism does."""

import json

import pytest
import torch
import torch.distributed as dist
from counted_launches import keep_rows_as_on_a_device
from torch import nn

import trainsentry
from trainsentry import PrecisionDebugger


class Reduced(torch.autograd.Function):
    """Sums over the ranks, in place: in the forward pass (True) or in the backward pass."""

    @staticmethod
    def forward(ctx, x, forward, seen):
        ctx.forward, ctx.seen = forward, seen
        if forward:
            seen.append(("a.output.0", x.max().item()))
            dist.all_reduce(x)
            ctx.mark_dirty(x)
        return x if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if not ctx.forward:
            ctx.seen.append(("b.input.0", gradient.max().item()))
            dist.all_reduce(gradient)
            ctx.seen.append(("a.output.0", gradient.max().item()))
        return gradient, None, None


class Parallel(nn.Module):
    """`way`: the forward pass reduces what has no gradient, or a `Function` reduces in either pass.

    It has no linear layer, whose function DeepSpeed replaces for the rest of a process.
    """

    def __init__(self, way):
        super().__init__()
        self.way, self.seen = way, []
        self.a, self.b = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)

    def forward(self, x):
        y = self.a(x)
        if self.way == "detached":
            y = y.detach()
            self.seen.append(("a.output.0", y.max().item()))
            dist.all_reduce(y)
        else:
            y = Reduced.apply(y, self.way == "forward", self.seen)
        if self.way != "backward":
            self.seen.append(("b.input.0", y.max().item()))
        return self.b(y)


def recorded(out, way, on_device, communication):
    """Train three steps; return the largest values that were seen and those that were recorded, by name."""
    torch.manual_seed(dist.get_rank())
    model = Parallel(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collect = {"activations": {"every": 1, "backward": True}, "communication": communication and {"every": 1}}
    config = {"output_dir": str(out), "strict": True, "detect": False, "collect": collect}
    with pytest.MonkeyPatch.context() as patch:
        if on_device:
            keep_rows_as_on_a_device(patch)
        monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)
    with monitor:
        for _ in range(3):
            model.seen.clear()
            model(torch.ones(2, 4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = monitor.records(last=1)
    of_gradients = rows.quantity.str.contains("grad")
    found = rows[(of_gradients == (way == "backward")) & rows.name.isin(["a.output.0", "b.input.0"])]
    return dict(model.seen), dict(zip(found.name, found["max"], strict=True))


def dumped(out):
    """Dump a backward pass that reduces in place; return the input's norm of `a`'s backward pass, and the true one."""
    torch.manual_seed(0)
    model = Parallel("backward")
    debugger = PrecisionDebugger(task="statistics", level="L1", dump_path=str(out))
    debugger.start(model)
    model(torch.ones(2, 4, 3)).sum().backward()
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    data = json.loads((out / "step0" / f"rank{dist.get_rank()}" / "dump.json").read_text())["data"]
    return data["Functional.conv1d.0.backward"]["input"][0]["Max"], dict(model.seen)["a.output.0"]
