"""Trains under a budget whose costs and clock the test makes up; the gradients of rank 1 are read slowly."""

import functools

import pytest
import torch
import torch.distributed as dist

import trainsentry
from trainsentry.collectors import guard
from trainsentry.collectors.torch.watch import TorchWatch
from trainsentry.monitor.ranks import rank_group
from trainsentry.monitor.trainer import overhead

STEPS, FAILS_AT = 60, 12


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 0.0

    def seconds(self):
        return self.now

    def nanoseconds(self):
        return round(self.now * 1e9)


def run(out, case):
    """Train on this rank; `case`: all is well ("common"), rank 0 is "left_out", or its monitor has "failed"."""
    with pytest.MonkeyPatch.context() as patch:
        _run(out, case, patch)


def _run(out, case, patch):
    clock, rank, read = Clock(), dist.get_rank(), TorchWatch._read_gradients

    def read_slowly(self, optimizer):
        if "gradients" in self._plan:
            clock.now += 0.02 if rank == 1 else 0.0001
        read(self, optimizer)

    patch.setattr(guard, "perf_counter_ns", clock.nanoseconds)
    patch.setattr(rank_group, "PATIENCE_SECONDS", 3.0)
    patch.setattr(overhead, "Cost", functools.partial(overhead.Cost, clock=clock.seconds))
    patch.setattr(TorchWatch, "_read_gradients", read_slowly)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"output_dir": str(out), "overhead_budget": 0.01, "detect": False}
    if case == "left_out":
        config["ranks"] = [1]
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)
    for step in range(STEPS):
        if case == "failed" and rank == 0 and step == FAILS_AT:
            monitor._guard.report("step boundary", RuntimeError("planted"))
        model(torch.randn(4, 8)).sum().backward()
        clock.now += 0.1
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    dist.barrier()
