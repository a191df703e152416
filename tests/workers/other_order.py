"""One rank calls two collectives in another order, or in another thread, once, at a step that is not sampled."""

import threading

import torch
import torch.distributed as dist
from torch import nn

import trainsentry

STEP = 33


def run(out, rank=None, sizes=(8, 8), *, in_thread=False):
    """Train under the default configuration; return the incidents of this rank and its log of calls.

    `in_thread`: the rank makes the calls in the usual order, in another thread.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "on_incident": {"dump": False}})
    monitor.watch(model, optimizer)
    numbers = [torch.zeros(size) for size in sizes]
    calls = [lambda: dist.all_reduce(numbers[0]), lambda: dist.all_reduce(numbers[1], op=dist.ReduceOp.MAX)]
    for step in range(40):
        model(torch.randn(4, 8)).square().mean().backward()
        is_other = step == STEP and dist.get_rank() == rank
        if is_other and in_thread:
            thread = threading.Thread(target=lambda: [call() for call in calls])
            thread.start()
            thread.join()
        else:
            for call in reversed(calls) if is_other else calls:
                call()
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)
        elif dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0)
        optimizer.step()
        optimizer.zero_grad()
    monitor.flush()
    dist.barrier()
    monitor.flush()
    found = [(i.kind, i.first_seen, i.rank, len(i.suspects), i.summary) for i in monitor.incidents]
    table = monitor.records().reset_index()
    monitor.close()
    dist.barrier()
    return found, table[table["name"] == "communication_order"]["value"].tolist()
