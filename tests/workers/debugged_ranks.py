"""Debuggers on several ranks: collectives, an overflow on one of them, sharded models."""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from debugged import Tower, make, read
from sharded_training import STRATEGIES
from strategy import batches
from torch import nn

import trainsentry
from trainsentry import OverflowLimitReached, PrecisionDebugger

SUBJECTS = ("bare", "monitor", "statistics", "tensor", "monitor and debugger")


def _debugger(folder, **config):
    path = Path(folder) / f"config{dist.get_rank()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"dump_path": str(folder / "dump"), **config}))
    return PrecisionDebugger(str(path))


def collectives(folder):
    """Make some collectives under a debugger; return this rank's dump."""
    debugger = _debugger(folder, task="tensor", level="L1")
    me = dist.get_rank()
    try:
        x = torch.full((2,), 1.0 + me)
        debugger.start()
        dist.all_reduce(x)
        out = torch.zeros(2 * dist.get_world_size())
        dist.all_gather_into_tensor(out, torch.full((2,), float(me)))
        work = dist.all_reduce(y := torch.ones(3), async_op=True)
        work.wait()
        y + 1
        debugger.stop()
        debugger.step()
        assert debugger._session.guard.failures == {}
    finally:
        debugger.close()
    return read(folder / "dump" / "step0" / f"rank{me}")["dump"]["data"]


def overflow_on(folder, rank, steps=4):
    """Train; `rank` overflows in step 2. Return the step at whose end this rank was stopped."""
    debugger = _debugger(folder, task="overflow_check", level="L1", overflow_check={"overflow_nums": 1})
    model = nn.parallel.DistributedDataParallel(make(Tower))
    try:
        for step in range(steps):
            debugger.start(model)
            x = torch.ones(2, 4)
            if step == 2 and dist.get_rank() == rank:
                x = x * 3e38 * 10
            loss = model(x).sum()
            dist.all_reduce(total := loss.detach().clone())
            del total
            debugger.stop()
            debugger.step()
    except OverflowLimitReached as stopped:
        return stopped.step
    finally:
        debugger.close()
    return None


def sharded(folder, kind):
    """Train a wrapped model under a debugger at level mix; return the names in this rank's dump and the losses."""
    losses = {}
    for watched in (False, True):
        model = make(Tower)
        if kind == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:
                fully_shard(block)
            wrapped = fully_shard(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
        debugger = _debugger(folder, task="tensor", level="mix") if watched else None
        found = losses[watched] = []
        try:
            for _ in range(2):
                if debugger:
                    debugger.start(wrapped)
                loss = wrapped(torch.ones(2, 4) * (1 + dist.get_rank())).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if debugger:
                    debugger.stop()
                    debugger.step()
                found.append(loss.item())
            if debugger:
                assert debugger._session.guard.failures == {}
        finally:
            PrecisionDebugger.close()
    data = read(folder / "dump" / "step1" / f"rank{dist.get_rank()}")["dump"]["data"]
    return losses, list(data)


def poisoned(folder, rank):
    """Train a step under a debugger at level mix, with a NaN in one weight of one rank."""
    debugger = _debugger(folder, task="statistics", level="mix")
    model = make(Tower)
    if dist.get_rank() == rank:
        with torch.no_grad():
            model.blocks[0].fc1.weight[0, 0] = float("nan")
    try:
        debugger.start(model)
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        debugger.stop()
        debugger.step()
    finally:
        debugger.close()


def under_strategy(name, folder, subject, steps=4, dumped=(1,), config=None):
    """Train under a strategy; return the losses, the seconds of the whole run, and what a debugger's guard contained.

    The seconds begin before the strategy is made and end when everything is closed on all ranks.
    """
    dist.barrier()
    began = time.perf_counter()
    chosen = STRATEGIES[name](torch.float32, 1)
    monitor = debugger = None
    if "monitor" in subject:
        settings = {"output_dir": str(Path(folder) / "monitor"), "strict": True, **(config or {})}
        monitor = trainsentry.TrainMonitor(settings).watch(chosen.model, chosen.optimizer)
    if subject in {"statistics", "tensor"} or "debugger" in subject:
        task = "tensor" if subject == "tensor" else "statistics"
        debugger = _debugger(folder, task=task, level="mix", step=list(dumped))
    failures = {}
    try:
        for micro_batches in batches(steps):
            if debugger:
                debugger.start(chosen.model)
            chosen.step(micro_batches)
            chosen.update()
            if debugger:
                debugger.stop()
                debugger.step()
        if debugger:
            failures = dict(debugger._session.guard.failures)
    finally:
        if debugger:
            PrecisionDebugger.close()
        if monitor:
            monitor.close()
    dist.barrier()
    seconds = time.perf_counter() - began
    whole = chosen.gathered(gradients=False)["parameter"]
    return {name: value.tolist() for name, value in whole.items()}, seconds, failures


def checked(folder):
    """Train a model under run_ut, rank 1 on other data; return the losses without and with it."""
    losses = {}
    for watched in (False, True):
        wrapped = nn.parallel.DistributedDataParallel(make(Tower))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-2)
        # No linear: DeepSpeed, which other tests of these ranks load, replaces torch's function by one of its own.
        debugger = _debugger(folder, task="run_ut", run_ut={"white_list": ["layer_norm"]}) if watched else None
        if debugger:
            debugger.start(wrapped)
        loss = wrapped(torch.full((3, 4), 1.0 + dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        if debugger:
            debugger.stop()
            debugger.step()
            assert debugger._session.guard.failures == {}
            debugger.close()
        losses[watched] = [loss.item(), *[p.sum().item() for p in wrapped.parameters()]]
    return losses
