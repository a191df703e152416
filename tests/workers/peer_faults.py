"""Faults that only a comparison of ranks shows: lost payloads, equal data, a slow rank."""

import time

import torch
import torch.distributed as dist
from torch import nn

import trainsentry

STEPS = 24
FAULT_STEP = 7


def run(out, fault, rank=None, data_parallel=False):
    """Train; return the incidents of this rank, as far as it knows them."""
    from torch._C._distributed_c10d import ProcessGroup

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    wrapped = nn.parallel.DistributedDataParallel(model) if data_parallel else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, me, raw = (
        0,
        dist.get_rank(),
        {n: vars(ProcessGroup)[n] for n in ("allreduce", "all_gather_single", "broadcast")},
    )

    def broken(name):
        original = getattr(ProcessGroup, name)

        def call(self, *args, **kwargs):
            work = original(self, *args, **kwargs)
            if fault == name and step == FAULT_STEP and me == rank:
                work.wait()
                given = args[0]
                (given[0] if isinstance(given, list) else given).zero_()
            return work

        return call

    for name in raw:
        setattr(ProcessGroup, name, broken(name))
    dense = {
        "communication": {"every": 1},
        "activations": {"every": 1},
        "gradients": {"every": 1, "before_reduction": fault == "gradient"},
    }
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "collect": dense, "on_incident": False})
    try:
        monitor.watch(wrapped, optimizer)
        seed = {"data": 0, "data of hosts": me % 2}.get(fault, me)
        generator = torch.Generator().manual_seed(seed)
        for step in range(3 * STEPS if fault in {"slow", "loss", "gradient"} else STEPS):
            x = torch.randn(4, 8, generator=generator)
            if fault == "slow" and me == rank:
                time.sleep(0.03)
            loss = wrapped(x).square().mean()
            hard = fault == "gradient" and me == rank and step >= 5 * FAULT_STEP
            (loss * 20 if hard else loss).backward()
            monitor.log(loss=loss * 20 if fault == "loss" and me == rank and step >= 5 * FAULT_STEP else loss)
            if not data_parallel:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                dist.all_gather_into_tensor(torch.zeros(8 * dist.get_world_size()), model[0].bias.grad)
                dist.broadcast(model[0].bias.grad.clone(), 0)
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        dist.barrier()
        monitor.flush()
        return [i.to_json() for i in monitor.incidents]
    finally:
        monitor.close()
        for name, method in raw.items():
            setattr(ProcessGroup, name, method)
