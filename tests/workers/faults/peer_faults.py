"""Plants faults that only a comparison of ranks shows: lost payloads, equal data, a slow rank."""

import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

import trainsentry

STEPS = 24
FAULT_STEP = 7
COLLECTIVES = ("allreduce", "all_gather_single", "broadcast")


@contextmanager
def losing(lost):
    """Zero the output of each collective of whose name `lost(name)` is true when it is called."""
    from torch._C._distributed_c10d import ProcessGroup

    def broken(name):
        original = getattr(ProcessGroup, name)

        def call(self, *args, **kwargs):
            work = original(self, *args, **kwargs)
            if lost(name):
                work.wait()
                given = args[0]
                (given[0] if isinstance(given, list) else given).zero_()
            return work

        return call

    raw = {name: vars(ProcessGroup)[name] for name in COLLECTIVES}
    for name in raw:
        setattr(ProcessGroup, name, broken(name))
    try:
        yield
    finally:
        for name, method in raw.items():
            setattr(ProcessGroup, name, method)


def run(out, fault, rank=None, data_parallel=False):
    """Train; return the incidents of this rank, as far as it knows them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    wrapped = nn.parallel.DistributedDataParallel(model) if data_parallel else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, here = 0, dist.get_rank() == rank
    dense = {
        "communication": {"every": 1},
        "activations": {"every": 1},
        "gradients": {"every": 1, "before_reduction": fault == "gradient"},
    }
    config = {"output_dir": str(out), "collect": dense, "on_incident": False}
    with (
        losing(lambda name: here and name == fault and step == FAULT_STEP),
        trainsentry.TrainMonitor(config).watch(wrapped, optimizer) as monitor,
    ):
        seed = {"data": 0, "data of hosts": dist.get_rank() % 2}.get(fault, dist.get_rank())
        generator = torch.Generator().manual_seed(seed)
        for step in range(3 * STEPS if fault in {"slow", "loss", "gradient"} else STEPS):
            x = torch.randn(4, 8, generator=generator)
            if fault == "slow" and here:
                time.sleep(0.03)
            loss = wrapped(x).square().mean()
            odd = here and step >= 5 * FAULT_STEP
            (loss * 20 if odd and fault == "gradient" else loss).backward()
            monitor.log(loss=loss * 20 if odd and fault == "loss" else loss)
            if not data_parallel:
                communicate(model)
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        dist.barrier()
        monitor.flush()
        return [i.to_json() for i in monitor.incidents]


def communicate(model):
    """Reduce the gradients by hand, and call two other collectives."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    dist.all_gather_into_tensor(torch.zeros(8 * dist.get_world_size()), model[0].bias.grad)
    dist.broadcast(model[0].bias.grad.clone(), 0)
