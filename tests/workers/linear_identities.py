"""Breaks sums that training among ranks must conserve: of gradients and their mean, of a call's inputs and outputs."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from sharded_training import STRATEGIES
from strategy import batches

import trainsentry

STEPS, FAULT = 16, 13


def incidents_of(name, out, *, broken):
    """Train under a strategy; at the step `FAULT` the reduced gradients are the sum over the ranks, not the mean."""
    torch.manual_seed(0)
    chosen = STRATEGIES[name](torch.float32, 1)
    collect = {"gradients": {"every": 1, "before_reduction": True}, "communication": {"every": 1}}
    config = {"output_dir": str(out), "strict": True, "on_incident": False, "collect": collect}
    monitor = trainsentry.TrainMonitor(config).watch(chosen.model, chosen.optimizer)
    try:
        for step, micro_batches in enumerate(batches(STEPS, 1)):
            chosen.step(micro_batches, None)
            if broken and step == FAULT:
                for gradient in reduced_gradients(chosen):
                    gradient.mul_(dist.get_world_size())
            chosen.update()
        monitor.flush()
    finally:
        monitor.close()
    return [(i.name, i.kind, i.step) for i in monitor.incidents]


def reduced_gradients(chosen):
    """Yield the gradients that the next update uses; ZeRO of DeepSpeed keeps them beside the parameters."""
    averaged = getattr(chosen.optimizer, "averaged_gradients", None)
    if averaged:
        yield from (gradient for group in averaged.values() for gradient in group if gradient is not None)
    else:
        yield from (p.grad for p in chosen.model.parameters() if p.grad is not None)


def incidents_of_lost_sums(out, *, broken):
    """Train under tensor parallelism; at the step `FAULT` rank 1 gets its own part instead of the sum."""
    steps, reduce = [], functional.all_reduce

    def lossy(x, *args, **kwargs):
        found = reduce(x, *args, **kwargs)
        return x.clone() if broken and len(steps) == FAULT and dist.get_rank() == 1 else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "all_reduce", lossy)
        chosen = STRATEGIES["TensorParallel"](torch.float32, 1)
        config = {"output_dir": str(out), "strict": True, "on_incident": False}
        config["collect"] = {"communication": {"every": 1}}
        with trainsentry.TrainMonitor(config).watch(chosen.model, chosen.optimizer) as monitor:
            for micro_batches in batches(STEPS, 1):
                chosen.step(micro_batches, None)
                chosen.update()
                steps.append(micro_batches)
            monitor.flush()
    return [(i.name, i.kind, i.step, i.rank) for i in monitor.incidents]
