"""Trains the small model on NPUs, one for each rank, under DDP or FSDP2, watched or not."""

import copy

import simulated_npu
import torch
import torch.distributed as dist
from strategy import batches, make_net
from torch import nn

import trainsentry

EVERYTHING = {part: {"every": 1} for part in (
    "gradients", "parameters", "optimizer_state", "updates", "activations", "communication"
)}  # fmt: skip


def wrapped(name, net):
    """Return the model under a strategy."""
    if name == "Ddp":
        return nn.parallel.DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("npu", (dist.get_world_size(),))
    fully_shard(net.inner, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def whole(tensor):
    """Return all of a tensor, on the host."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().cpu().double()


def train_saturating(*args, **kwargs):
    """Train on devices in saturation mode, where results stay finite and a flag tells of an overflow."""
    with simulated_npu.saturating():
        return train(*args, **kwargs)


def train(name, out, *, watched=True, steps=4, overflow_at=None, settings=None):
    """Return the losses and, for each step, the norm of each whole parameter and gradient before its update."""
    net = make_net().to("npu")
    model = wrapped(name, net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"output_dir": str(out), "collect": EVERYTHING, "strict": True, **copy.deepcopy(settings or {})}
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer) if watched else None
    losses, truth, stopped = [], [], None
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        for step, (x,) in enumerate(batches(steps)):
            given = x[rank::size].to("npu")
            if step == overflow_at and rank == 1:
                given = given * float("inf")
            loss = model(given).square().mean()
            loss.backward()
            truth.append({n: (whole(p).norm().item(), whole(p.grad).norm().item()) for n, p in net.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    except trainsentry.TrainingStopped as error:
        stopped = error.step
    finally:
        if monitor is not None:
            monitor.close()
    return losses, truth, stopped
