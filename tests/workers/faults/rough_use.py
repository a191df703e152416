"""Rough but allowed uses of several ranks: early ends, other threads, collectives that nobody waits for."""

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import trainsentry
from trainsentry.collectors.torch.distributed.rendezvous import GAVE_UP, GroupMaxReduce
from trainsentry.monitor.debugger.overflow_count import OverflowCount


def parts():
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model, optimizer):
    model(torch.randn(4, 64)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()


def rank_0_closes_first(out):
    """Rank 0 ends, and rank 1 some seconds later; return how long its close took."""
    model, optimizer = parts()
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "export": {"max_wait": 1.0}}).watch(model, optimizer)
    for _ in range(5):
        step(model, optimizer)
    if dist.get_rank() == 1:
        time.sleep(3)
    began = time.monotonic()
    monitor.close()
    took = time.monotonic() - began
    dist.barrier()
    return took


def inner_module(out):
    """The module inside a DistributedDataParallel is watched, and nothing else changes."""
    model, _ = parts()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(wrapped.module, optimizer) as monitor:
        for _ in range(3):
            wrapped(torch.randn(4, 64)).sum().backward()
            optimizer.step()
        return monitor._loop.step


def works_nobody_waits_for(out):
    """Return how many works the monitor holds after unsampled steps with collectives that are only polled."""
    model, optimizer = parts()
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(model, optimizer)
    for _ in range(5):
        works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(10)]
        while not all(work.is_completed() for work in works):
            time.sleep(0.001)
        step(model, optimizer)
    held = sum(work is not None for work, _ in monitor._loop.watch.communication._open.values())
    monitor.close()
    return held


def other_threads(out):
    """Call collectives in a background thread during training; return failures and incidents."""
    model, optimizer = parts()
    group = dist.new_group(backend="gloo")
    everything = {"communication": {"every": 1}, "parameters": {"every": 1}}
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "collect": everything}).watch(model, optimizer)
    done = threading.Event()

    def talk():
        for _ in range(200):
            dist.all_reduce(torch.ones(16), group=group)
        done.set()

    thread = threading.Thread(target=talk)
    thread.start()
    for _ in range(60):
        step(model, optimizer)
    thread.join()
    monitor.flush()
    dist.barrier()
    monitor.flush()
    found = dict(monitor._guard.failures), [i.summary for i in monitor.incidents]
    monitor.close()
    return found


def dense_beside_a_failed_monitor(out):
    """Rank 1's monitor fails; then an incident on rank 0 makes steps dense. Return failures of the agreement."""
    model, optimizer = parts()
    collect = {p: {"every": 10} for p in ("gradients", "parameters", "updates", "optimizer_state", "activations")}
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "collect": collect}).watch(model, optimizer)
    for i in range(50):
        if i == 5 and dist.get_rank() == 1:
            monitor._guard.report("step boundary", RuntimeError("planted"))
        if i == 20 and dist.get_rank() == 0:
            monitor.log(loss=float("nan"))
        step(model, optimizer)
    dense = monitor._loop.schedule.dense
    found = "agreement of the ranks" in monitor._guard.failures, (dense.start, dense.stop)
    monitor.close()
    return found


def unwatched_rank_of_two_watches(out):
    """Two models watched in two calls, the second stepping seldom, on a rank that is watched and one that is not."""
    first, second = parts(), parts()
    names = nn.ModuleDict({"other": second[0]})
    monitor = trainsentry.TrainMonitor({"output_dir": str(out), "ranks": [0]})
    monitor.watch(*first)
    monitor.watch(names, second[1])
    for i in range(12):
        step(*first)
        if i % 3 == 2:
            step(*second)
    count = monitor._loop.step if monitor._loop is not None else monitor._unwatched_rank.step
    broken = "agreement of the ranks" in monitor._guard.failures
    monitor.close()
    return count, broken


def uneven_steps(out):
    """Ranks that take different numbers of steps between collectives; return the longest step, and the patience."""
    group = dist.distributed_c10d._get_default_group()
    options = group._get_backend(torch.device("cpu")).options
    usual, options._timeout = options._timeout, timedelta(seconds=8)
    try:
        model, optimizer = parts()
        monitor = trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer)
        patience, longest = monitor._loop.consensus.max_reduce._max_wait, 0.0
    finally:
        options._timeout = usual
    for _ in range(2):
        for _ in range(6 + 4 * dist.get_rank()):
            began = time.monotonic()
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            longest = max(longest, time.monotonic() - began)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
    monitor.close()
    return longest, patience


def one_gives_up(out):
    """Rank 1 waits no longer for an answer that rank 0 waits for; return what rank 0 is told, and counts then."""
    model, optimizer = parts()
    monitor = trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer)
    max_reduce, told, overflows = GroupMaxReduce(monitor._rank_group.rendezvous, 600.0), "", OverflowCount(limit=5)
    if dist.get_rank() == 0:
        max_reduce.propose([1.0])
        try:
            max_reduce.result()
        except TimeoutError as error:
            told = str(error)
        overflows._max_reduce = max_reduce
        max_reduce._work = max_reduce._values = None
        overflows.end_step(0, (3, None, False), None)  # ends no training
    else:
        monitor._rank_group.rendezvous.store.put(GAVE_UP, "")
    dist.barrier()
    if dist.get_rank() == 1:  # so that nothing is left under way in the group
        for _ in range(2):
            max_reduce.propose([1.0])
            max_reduce.result()
    monitor.close()
    return told, overflows.calls
