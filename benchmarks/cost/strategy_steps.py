"""Measures the step times of one strategy with and without a monitor; `strategies.py` runs it on every rank."""

import statistics
import time
from pathlib import Path

import strategy as small_model
import torch
import torch.distributed as dist
from sharded_training import STRATEGIES
from torch import nn

import trainsentry

ROUNDS = 3
STEPS = 25


class Wide(small_model.Net):
    """The tests' model with layers so wide that a step takes about 50 ms."""

    def __init__(self, hidden: int = 0) -> None:
        del hidden
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(7, 1520), nn.GELU(), nn.Linear(1520, 1520), nn.GELU(), nn.Linear(1520, 1520)
        )
        self.norm = nn.LayerNorm(1520)
        self.module = nn.Linear(1520, 3)


def overhead(name: str, out: Path) -> float:
    """Return the ratio of median step times, default configuration ÷ no monitor, in alternating rounds."""
    net = small_model.Net
    small_model.Net = Wide  # type: ignore[misc]
    try:
        strategy = STRATEGIES[name](torch.float32, 1)
    finally:
        small_model.Net = net  # type: ignore[misc]
    batch = [torch.randn(256, 7)]
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * ROUNDS):
        monitored = bool(turn % 2)
        monitor = None
        if monitored:
            monitor = trainsentry.TrainMonitor({"output_dir": str(Path(out) / str(turn))})
            monitor.watch(strategy.model, strategy.optimizer)
        for step in range(STEPS):
            began = time.perf_counter()
            strategy.step(batch)
            strategy.update()
            if step >= 5:  # the first steps define series and warm up
                times[monitored].append(time.perf_counter() - began)
        if monitor is not None:
            monitor.close()
        dist.barrier()
    return statistics.fmean(times[True]) / statistics.fmean(times[False])
