"""Stops runs of several ranks and lets them go on; trains the stages of a pipeline."""

import copy
import json

import strategy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_strategies
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import trainsentry

DENSE = {"parameters": {"every": 1}, "communication": {"every": 1}}


def parts():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    torch.manual_seed(1 + dist.get_rank())  # each rank has its own data
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
        state = {"model": model.state_dict(), "monitor": monitor}
        dcp.save(state, checkpoint_id=str(checkpoint))
        moments = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 3)
    model, optimizer = parts()
    with trainsentry.TrainMonitor({"output_dir": str(out), "collect": DENSE}).watch(model, optimizer) as monitor:
        dcp.load({"model": model.state_dict(), "monitor": monitor}, checkpoint_id=str(checkpoint))
        optimizer.load_state_dict(moments)
        step = monitor._loop.step
        train(model, optimizer, 4)
        monitor.flush()
        return step, [i.summary for i in monitor.incidents]


def learned_by(out, checkpoint):
    """Save what each rank has learned; return whose every rank loads, and whether that is what this rank has."""
    model, optimizer = parts()
    with trainsentry.TrainMonitor({"output_dir": str(out), "collect": DENSE}).watch(model, optimizer) as monitor:
        train(model, optimizer, 6)
        own = monitor.state_dict()["detection"]
        dcp.save({"monitor": monitor}, checkpoint_id=str(checkpoint))
    loaded = {"monitor": trainsentry.TrainMonitor().state_dict()}
    dcp.load(loaded, checkpoint_id=str(checkpoint))
    detection = loaded["monitor"]["detection"]
    return json.loads(detection)["rank"], detection == own


class DdpWithStatistics(strategy.Strategy):
    """Replicas whose running statistics differ, as each sees its own data."""

    def build(self, dtype):
        super().build(dtype)
        self.plain.norm = nn.BatchNorm1d(5)
        self.model = nn.parallel.DistributedDataParallel(self.plain, broadcast_buffers=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)


KINDS = {"ddp": DdpWithStatistics, "fsdp2": torch_strategies.Fsdp2, "tp": torch_strategies.TensorParallel}


def steps_of(kind, steps):
    for batches in strategy.batches(steps):
        kind.step(batches)
        kind.update()


def watched(kind, out, **config):
    return trainsentry.TrainMonitor({"output_dir": str(out), "strict": True, **config}).watch(
        kind.model, kind.optimizer
    )


def told(monitor):
    """The evidence of all suspects: on the first rank, whose recorder makes the incidents, all of them."""
    monitor.flush()
    dist.barrier()
    monitor.flush()
    return sorted(suspect.evidence for incident in monitor.incidents for suspect in incident.suspects)


def resumed(out, kind, change=None, *, of_first=False):
    """Save each rank's own state, or with `of_first` the first rank's model; change it, resume, return what is told."""
    before = KINDS[kind](torch.float32, 1)
    with watched(before, out) as monitor:
        steps_of(before, 4)
        saved = copy.deepcopy((before.model.state_dict(), before.optimizer.state_dict(), monitor.state_dict()))
    if of_first:
        for tensor in saved[0].values():
            dist.broadcast(tensor, 0)
    if change is not None:
        CHANGES[change](saved)
    after = KINDS[kind](torch.float32, 1)
    with watched(after, out) as monitor:
        monitor.load_state_dict(saved[2])
        after.model.load_state_dict(saved[0])
        after.optimizer.load_state_dict(saved[1])
        steps_of(after, 2)
        return told(monitor)


def _flip_on_rank_1(saved):
    if dist.get_rank() == 1:
        weight = saved[0]["inner.0.weight"]
        getattr(weight, "_local_tensor", weight).view(torch.int32)[0, 0] ^= 1


def _shard_of_rank_0(saved):
    shard = saved[0]["inner.0.weight"]._local_tensor
    received = shard.clone()
    dist.broadcast(received, 0)
    shard.copy_(received)


def _moments_exchanged(saved):
    state = saved[1]["state"]
    state[0]["exp_avg"], state[0]["exp_avg_sq"] = state[0]["exp_avg_sq"], state[0]["exp_avg"]


CHANGES = {"flip": _flip_on_rank_1, "shard": _shard_of_rank_0, "moments": _moments_exchanged}


def save_distributed(out, checkpoint, kind):
    """Save a run by torch's distributed checkpoint."""
    run = KINDS[kind](torch.float32, 1)
    with watched(run, out) as monitor:
        steps_of(run, 4)
        state = {
            "model": get_model_state_dict(run.model),
            "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
            "monitor": monitor,
        }
        dcp.save(state, checkpoint_id=str(checkpoint))


def resume_distributed(out, checkpoint, kind, change=None):
    """Resume from such a checkpoint; with `change`, a bit of rank 1's shard or of the whole is another one."""
    run = KINDS[kind](torch.float32, 1)
    state = {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer),  # it makes a step, and so comes before `watch`
    }
    with watched(run, out) as monitor:
        dcp.load({**state, "monitor": monitor}, checkpoint_id=str(checkpoint))
        if change is not None:
            CHANGES[change]((state["model"],))
        set_model_state_dict(run.model, state["model"])
        set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
        steps_of(run, 2)
        return told(monitor)


def save_on_some(out, kind):
    """Ask for the state on rank 0 alone; return the warnings."""
    run = KINDS[kind](torch.float32, 1)
    with watched(run, out) as monitor:
        steps_of(run, 4)
        if dist.get_rank() == 0:
            monitor.state_dict()
        steps_of(run, 2)
        return told(monitor), list(monitor._guard.failures)


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
