"""Trains while commands arrive in the control file; returns when each rank saw them."""

import time

import torch
import torch.distributed as dist
from sharded_training import STRATEGIES
from strategy import batches

import trainsentry
from trainsentry.monitor.control.control_file import send
from trainsentry.monitor.trainer import live_control

SELDOM = {part: {"every": 100} for part in ("gradients", "parameters", "optimizer_state", "updates", "activations")}
COMMANDS = {
    4: {"set": {"collect.gradients.every": 1}, "for": 4},
    14: {"dump": "now"},
    20: {"stop": "enough"},
}


def run(out, *, ranks="all", budget=None, path="control.jsonl"):
    """Train until stopped; return (step of the stop, its reason, steps done)."""
    live_control.LOOK_SECONDS = 0.0
    strategy = STRATEGIES["Ddp"](torch.float32, 1)
    collect = {**SELDOM, "parameters": {"every": 5}}  # the ranks exchange proposals every 5 steps
    settings = {"output_dir": str(out), "collect": collect, "ranks": ranks, "overhead_budget": budget, "detect": False}
    monitor = trainsentry.TrainMonitor(settings).watch(strategy.model, strategy.optimizer)
    done = 0
    try:
        for step, micro_batches in enumerate(batches(60)):
            if step in COMMANDS and dist.get_rank() == 0:
                send(out / path, {**COMMANDS[step], "time": time.time()})
            strategy.step(micro_batches, None)
            strategy.update()
            done += 1
    except trainsentry.TrainingStopped as stop:
        return stop.step, stop.reason, done
    else:
        return None, "", done
    finally:
        live_control.LOOK_SECONDS = 1.0
        monitor.close()
