"""Trains while a bit of one rank's replica flips, or none does."""

import torch
import torch.distributed as dist
from sharded_training import STRATEGIES
from strategy import batches

import trainsentry

STEPS = 24
FAULT_STEP = 9


def run(name, out, *, rank=None, parameter="inner.0.weight", bit=10, config=None):
    """Train; flip one bit of a parameter's local part on `rank`. Return the incidents that each rank knows."""
    strategy = STRATEGIES[name](torch.float32, 1)
    settings = {"output_dir": str(out), **(config or {})}
    monitor = trainsentry.TrainMonitor(settings).watch(strategy.model, strategy.optimizer)
    for step, micro_batches in enumerate(batches(STEPS)):
        if step == FAULT_STEP and dist.get_rank() == rank:
            held = strategy.names()[parameter].detach()
            held = held.to_local() if hasattr(held, "to_local") else held
            held.view(torch.int32).view(-1)[0] ^= 1 << bit
        strategy.step(micro_batches)
        strategy.update()
    return known_incidents(monitor)


def known_incidents(monitor):
    """Return the incidents that a rank knows once every rank has told all; close its monitor."""
    monitor.flush()
    dist.barrier()
    monitor.flush()
    found = [i.to_json() for i in monitor.incidents]
    monitor.close()
    return found
