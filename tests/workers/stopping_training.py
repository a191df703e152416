"""Stops training by an event on one rank, and returns how each rank ended."""

import math
import os
import threading

import torch
import torch.distributed as dist
from sharded_training import STRATEGIES
from strategy import batches

import trainsentry
from trainsentry.collectors.torch.watch import TorchWatch
from trainsentry.monitor.ranks import consensus

STEPS = 30
FAULT_STEP = 4


def poisoned(rank):
    def poison(strategy, out, micro_step):
        return out * math.nan if dist.get_rank() == rank else out

    return poison


def run(name, out, *, fault, rank, config=None, broken=None, many=False):
    """Train until stopped, as if there were `many` ranks; return (class, step, reason, steps done, suspected ranks)."""
    usual, consensus.MANY_RANKS = consensus.MANY_RANKS, 2 if many else consensus.MANY_RANKS
    strategy = STRATEGIES[name](torch.float32, 1)
    settings = {"output_dir": str(out), **(config or {})}
    monitor = trainsentry.TrainMonitor(settings).watch(strategy.model, strategy.optimizer)
    watchdog = threading.Timer(60, os._exit, [3])  # a hang ends the rank, and the test with it
    watchdog.daemon = True
    watchdog.start()
    undo = break_monitor(broken)
    done = 0
    try:
        for step, micro_batches in enumerate(batches(STEPS)):
            bad = step >= FAULT_STEP and fault == "nan"
            strategy.step(micro_batches, poisoned(rank) if bad else None)
            if fault == "request" and step == FAULT_STEP and dist.get_rank() == rank:
                monitor.request_stop("enough")
            strategy.update()
            done += 1
    except trainsentry.TrainingStopped as stop:
        return type(stop).__name__, stop.step, stop.reason, done, [i.rank for i in monitor.incidents]
    else:
        return None, done, "", done, []
    finally:
        undo()
        consensus.MANY_RANKS = usual
        monitor.close()
        watchdog.cancel()


def break_monitor(how):
    """Make a collector slow, or the step boundary fail, on this rank; return a function that undoes it."""
    original = TorchWatch._read_gradients
    if how is None or dist.get_rank() != how[1]:
        return lambda: None

    def slow(self, optimizer):
        threading.Event().wait(0.02)
        original(self, optimizer)

    def failing(self, optimizer):
        raise RuntimeError("planted")

    if how[0] == "boundary":
        take = TorchWatch.take
        TorchWatch.take = lambda self: failing(self, None)
        return lambda: setattr(TorchWatch, "take", take)
    TorchWatch._read_gradients = slow if how[0] == "slow" else failing
    return lambda: setattr(TorchWatch, "_read_gradients", original)
