"""Trains the small model under a strategy while a monitor and a debugger watch together, or neither."""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_training import STRATEGIES
from strategy import batches

import trainsentry
from trainsentry import PrecisionDebugger

SUBJECTS = ("bare", "monitor", "statistics", "tensor", "monitor and debugger")


def debugger_of(folder, task, steps):
    path = Path(folder) / f"config{dist.get_rank()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    config = {"dump_path": str(Path(folder) / "dump"), "task": task, "level": "mix", "step": steps}
    path.write_text(json.dumps(config))
    return PrecisionDebugger(str(path))


def train(name, folder, subject, steps=4, dumped=(1,), config=None):
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
        debugger = debugger_of(folder, "tensor" if subject == "tensor" else "statistics", list(dumped))
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
