"""Calls collectives of every kind, with numbers whose statistics are known."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import trainsentry


def calls(group=None):
    """Make each kind of call once; return the results of the waits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.full((6,), float(rank + 1))
    results = []
    dist.all_reduce(own.clone())
    work = dist.all_reduce(own.clone(), async_op=True)
    results.append(work.wait())
    dist.broadcast(own.clone(), 0)
    dist.reduce(own.clone(), 0)
    dist.all_gather([torch.zeros(6) for _ in range(size)], own)
    dist.all_gather_into_tensor(torch.zeros(6 * size), own)
    dist.gather(own, [torch.zeros(6) for _ in range(size)] if rank == 0 else None)
    dist.scatter(torch.zeros(6), [own.clone() for _ in range(size)] if rank == 0 else None)
    dist.reduce_scatter_tensor(torch.zeros(3), own[: 3 * size].repeat(1))
    dist.all_to_all_single(torch.zeros(6), own)
    if rank == 0:
        dist.send(own, 1)
        dist.recv(torch.zeros(6), 1)
    else:
        dist.recv(torch.zeros(6), 0)
        dist.send(own, 0)
    other = 1 - rank
    pair = [dist.P2POp(dist.isend, own, other), dist.P2POp(dist.irecv, torch.zeros(6), other)]
    results += [work.wait() for work in dist.batch_isend_irecv(pair)]
    summed = functional.all_reduce(own, "sum", dist.group.WORLD)
    results.append(float((summed + 0).sum()))
    dist.barrier()
    return results


def watched(out, config=None):
    """Make the calls in a sampled and in an unsampled step; return the results of the waits, watched and not."""
    from torch._C._distributed_c10d import ProcessGroup, Work

    before = {**vars(ProcessGroup), "wait": vars(Work)["wait"]}
    bare = calls()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"output_dir": str(out), "strict": True, "collect": {"communication": {"every": 2}}, **(config or {})}
    found = []
    with trainsentry.TrainMonitor(settings).watch(model, optimizer) as monitor:
        for _ in range(2):
            found.append(calls())
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        left = len(monitor._loop.watch.communication.open_calls)
    after = {**vars(ProcessGroup), "wait": vars(Work)["wait"]}
    return bare, found, left, [name for name in before if before[name] is not after[name]]


def padded(out):
    """All-gather into a buffer whose padding nobody wrote."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer) as monitor:
        for _ in range(11):
            share = torch.tensor([1.0, float("nan")])
            dist.all_gather_into_tensor(torch.zeros(4), share)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        monitor.flush()
        return [i.summary for i in monitor.incidents]
