"""Calls `watch` wrongly on several ranks."""

import torch
import torch.distributed as dist
from tiny_models import step
from torch import nn

import trainsentry
from trainsentry.collectors.torch.distributed import rendezvous


def parts():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def ranks_beyond_the_world(out):
    trainsentry.TrainMonitor({"output_dir": str(out), "ranks": [0, 5]}).watch(*parts())


def wrapped_late(out, how):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model, optimizer = parts()
    monitor = trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer)
    try:
        if how == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif how == "fsdp1":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
        step(model, optimizer)
    finally:
        monitor.close()


def stale_optimizer(out):
    from torch.distributed.fsdp import fully_shard

    model, optimizer = parts()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer)


def only_rank_0_watches(out):
    if dist.get_rank() == 0:
        meet = rendezvous._gather_at_store
        rendezvous._gather_at_store = lambda rank, size, timeout: meet(rank, size, 1.0)
        try:
            trainsentry.TrainMonitor({"output_dir": str(out)}).watch(*parts())
        finally:
            rendezvous._gather_at_store = meet
    else:
        rendezvous._count += 1  # it counts the calls that it missed


def no_group_can_be_made(out):
    """Train where gloo cannot connect the monitor's group, as after a restart; return the steps and the warning."""

    def refuse(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed")

    model, optimizer = parts()
    make, dist.new_group = dist.new_group, refuse
    try:
        monitor = trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer)
    finally:
        dist.new_group = make
    with monitor:
        for _ in range(3):
            step(model, optimizer)
        return monitor._loop.step, monitor._guard.failures["ranks"].last


def different_configurations(out):
    trainsentry.TrainMonitor({"output_dir": str(out), "eps": float(dist.get_rank())}).watch(*parts())


def all_is_well(out):
    model, optimizer = parts()
    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer) as monitor:
        for _ in range(3):
            step(model, optimizer)
        return monitor._loop.step
