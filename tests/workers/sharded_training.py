"""Trains the small model under a strategy while it is watched, and gathers its tensors whole, in float64, beside it."""

import deepspeed_strategies
import strategy
import torch
import torch_strategies
from strategy import batches

import trainsentry

STRATEGIES = {
    name: cls
    for module in (strategy, torch_strategies, deepspeed_strategies)
    for name, cls in vars(module).items()
    if isinstance(cls, type) and issubclass(cls, strategy.Strategy)
}


def train(name, out, *, dtype="float32", steps=5, micro_steps=1, config=None, poison=None, gather=True):
    """Train under a strategy while the monitor watches; return each step's whole tensors."""
    chosen = STRATEGIES[name](getattr(torch, dtype), micro_steps)
    everything = {part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state", "updates")}
    everything["activations"] = {"every": 1}
    settings = {"output_dir": str(out), "collect": everything, "detect": False, "strict": True, **(config or {})}
    monitor = trainsentry.TrainMonitor(settings).watch(chosen.model, chosen.optimizer)
    found = []
    try:
        for micro_batches in batches(steps, micro_steps):
            chosen.step(micro_batches, poison)
            found.append(chosen.gathered() if gather else None)
            chosen.update()
            chosen.updates += 1
    finally:
        monitor.close()
    found.append(chosen.gathered(gradients=False) if gather else None)
    return found


def write_outside(name, out, *, steps, at):
    """Train under a strategy; write to one weight ahead of the step `at`, and so outside the update."""
    chosen = STRATEGIES[name](torch.float32, 1)
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}).watch(chosen.model, chosen.optimizer):
        for step, micro_batches in enumerate(batches(steps)):
            if step == at:
                held = chosen.optimizer.param_groups[0]["params"]
                weight, *_ = (
                    held or chosen.optimizer.fp32_partitioned_groups_flat
                )  # ZeRO-3 lends its parts for an update
                with torch.no_grad():
                    getattr(weight, "_local_tensor", weight).mul_(1.01)
            chosen.step(micro_batches)
            chosen.update()
