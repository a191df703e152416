"""Stops runs of several ranks and lets them go on; trains the stages of a pipeline."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import trainsentry

DENSE = {"parameters": {"every": 1}, "communication": {"every": 1}}


def parts():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpointed(out, checkpoint):
    """Six steps, a checkpoint of the monitor itself, three more; then a new run goes on from the checkpoint."""
    model, optimizer = parts()
    with trainsentry.TrainMonitor({"output_dir": str(out), "collect": DENSE}).watch(model, optimizer) as monitor:
        train(model, optimizer, 6)
        dcp.save({"model": model.state_dict(), "monitor": monitor}, checkpoint_id=str(checkpoint))
        train(model, optimizer, 3)
    model, optimizer = parts()
    with trainsentry.TrainMonitor({"output_dir": str(out), "collect": DENSE}).watch(model, optimizer) as monitor:
        dcp.load({"model": model.state_dict(), "monitor": monitor}, checkpoint_id=str(checkpoint))
        step = monitor._loop.step
        train(model, optimizer, 4)
        monitor.flush()
        return step, [i.summary for i in monitor.incidents]


def run_once(out, start_step, steps):
    model, optimizer = parts()
    config = {"output_dir": str(out), "collect": DENSE}
    with trainsentry.TrainMonitor(config).watch(model, optimizer, start_step=start_step):
        train(model, optimizer, steps)


class Stack(nn.Module):
    """Some of four layers, named by their number in the whole model or counted from 0."""

    def __init__(self, numbers, offset):
        super().__init__()
        self.layers = nn.ModuleDict({str(n - offset): nn.Linear(8, 8) for n in numbers})

    def forward(self, x):
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def pipeline(out, own_numbers=False):
    """Two stages of a pipeline; with `own_numbers` both call their layers 0 and 1."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Stack([2 * rank, 2 * rank + 1], 2 * rank if own_numbers else 0)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"output_dir": str(out), "collect": {**DENSE, "activations": {"every": 1}}, "strict": True}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for _ in range(12):
            x, target = torch.randn(8, 8), torch.randn(8, 8)
            schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank else {}))
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        dist.barrier()
        monitor.flush()
        return [i.summary for i in monitor.incidents]


def pipeline_over_old_memory(out):
    """A pipeline in a process whose fresh memory holds NaN, as memory that was used before may."""
    torch.use_deterministic_algorithms(True)  # torch then fills what it allocates with NaN
    try:
        return pipeline(out)
    finally:
        torch.use_deterministic_algorithms(False)
