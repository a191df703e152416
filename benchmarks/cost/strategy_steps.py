"""Measures the step times of one strategy with and without a monitor; `strategies.py` runs it on every rank."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import debugged_ranks
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


@contextmanager
def wide_model() -> Iterator[None]:
    """Let strategies be made of the wide model."""
    net = small_model.Net
    small_model.Net = Wide  # type: ignore[misc]
    try:
        yield
    finally:
        small_model.Net = net  # type: ignore[misc]


def whole_run(name: str, out: Path, subject: str, steps: int) -> float:
    """Return the seconds of a run of some steps under one of `debugged_ranks.SUBJECTS`, from its start to its end.

    A debugger dumps two of the steps.
    """
    with wide_model():
        return float(debugged_ranks.under_strategy(name, out, subject, steps=steps, dumped=(5, 15))[1])


def overhead(name: str, out: Path) -> float:
    """Return the ratio of median step times, default configuration ÷ no monitor, in alternating rounds."""
    with wide_model():
        strategy = STRATEGIES[name](torch.float32, 1)
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
