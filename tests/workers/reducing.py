"""Trains under DistributedDataParallel, whose reducer calls the process group in C++."""

import time

import torch
import torch.distributed as dist
from torch import nn

import trainsentry

STEPS = 6
LOST_STEP = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(40, 60)
        self.norm = nn.BatchNorm1d(60)
        self.last = nn.Linear(60, 40)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def lose_payload(when):
    """Have C++'s all-reduce give zeros on this rank while `when()` is true; return a function that undoes it."""
    operator = torch.ops.c10d.allreduce_.default

    def kernel(keyset, tensors, *args):
        tensors, work = operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, tensors, *args)
        if when():
            dist.Work.unbox(work).wait()
            tensors[0].zero_()
        return tensors, work

    library = torch.library.Library("c10d", "IMPL")
    library.impl("allreduce_", kernel, "ADInplaceOrView", with_keyset=True)
    return library._destroy


def train(out, *, monitored=True, lost_on=None, slow=None, steps=STEPS, fail_at=None, **ddp):
    """Train; return the final weights, the incidents, and the kernels of the operator afterwards."""
    before = torch._C._dispatch_dump("c10d::allreduce_")
    torch.manual_seed(0)
    me, step = dist.get_rank(), 0
    model = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.005, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    undo = lose_payload(lambda: lost_on == me and step == LOST_STEP)
    config = {"output_dir": str(out), "strict": True, "on_incident": False}
    config["collect"] = {"communication": {"every": 1, "reducer": True}}
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer) if monitored else None
    generator = torch.Generator().manual_seed(me)
    try:
        for step in range(steps):
            x = torch.randn(8, 40, generator=generator)
            if slow == me:
                time.sleep(0.03)
            loss = model(x).square().mean()
            if fail_at == step:
                handle = model.module.first.weight.register_hook(_fail)
                try:
                    loss.backward()
                except ValueError:
                    handle.remove()
                    break
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            monitor.flush()
            dist.barrier()
            monitor.flush()
        incidents = [i.to_json() for i in monitor.incidents] if monitor is not None else []
        left = len(monitor._loop.watch.communication.open_calls) if monitor is not None else 0
    finally:
        undo()
        if monitor is not None:
            monitor.close()
    weights = {name: value.clone() for name, value in model.module.state_dict().items()}
    return weights, incidents, left, torch._C._dispatch_dump("c10d::allreduce_") == before


def _fail(_):
    raise ValueError("a hook of the user's fails")
