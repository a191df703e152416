"""Trains with FSDP2 or tensor parallelism, where a number that all ranks have in common parts at one step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import trainsentry

STEPS = 60
FAULT_STEP = 43
MOST = 0.05


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def sharded(mesh):
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split(mesh):
    return parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def clip(model, of_own_shards):
    """Clip all gradients by their norm, or wrongly each rank its own by theirs; return the norm."""
    own = [p.grad.to_local() for p in model.parameters()]
    squares = torch.stack([g.square().sum() for g in own]).sum()
    if not of_own_shards:
        dist.all_reduce(squares)
    torch._foreach_mul_(own, MOST / squares.sqrt())
    return squares.sqrt()


def run(out, how, fault=None):
    """Train under the default configuration; return the incidents that this rank knows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded(mesh) if how == "sharded" else split(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + (dist.get_rank() if how == "sharded" else 0))
    other = torch.Generator().manual_seed(9)
    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer) as monitor:
        for step in range(STEPS):
            faulty = fault is not None and step >= FAULT_STEP
            is_odd = faulty and fault == "another batch" and dist.get_rank() == 1
            x = torch.randn(8, 16, generator=other if is_odd else generator)
            loss = (model(x) - x.roll(1, -1)).square().mean()
            loss.backward()
            monitor.log(loss=loss.detach())
            if how == "sharded":
                monitor.log(grad_norm=clip(model, faulty and fault == "own norms"))
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        dist.barrier()
        monitor.flush()
        return [i.to_json() for i in monitor.incidents]
