"""Counts the incidents of healthy runs: every one is a false alarm.

    python benchmarks/detection/clean_runs.py [--steps 300] [--seeds 0-1] [--tasks spirals,images]
        [--plans "AdamW 1e-3,SGD 5e-2"] [--collect default] [--larger]

Trains the models of `clean_tasks.py`, each with nine optimizers and schedules, under the default configuration and
with everything collected at every step, in two processes; `--larger` trains those of `larger_tasks.py`, with three.
"""

import argparse
import contextlib
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from clean_tasks import TASKS, Task
from larger_tasks import LARGER
from machine import describe_machine
from torch import Tensor, nn

import trainsentry
from trainsentry.collectors.alignment import ALIGNMENT
from trainsentry.collectors.statistics import STATISTICS

EVERYTHING = {p: {"every": 1} for p in ("gradients", "parameters", "optimizer_state", "updates", "activations")}
COLLECT: dict[str, dict[str, Any]] = {"default": {}, "everything": EVERYTHING}


def _warm_then_drop(step: int, steps: int) -> float:
    """Return the learning-rate factor: a warm-up of 20 steps, and a tenfold drop at 70 %."""
    return min((step + 1) / 20, 1) * (0.1 if step > steps * 0.7 else 1)


def _one_cycle(step: int, steps: int) -> float:
    """Return the learning-rate factor: one rise, and one fall to zero."""
    return max(math.sin(math.pi * (step + 1) / (steps + 1)), 1e-3)


def _restarts(step: int, steps: int) -> float:
    """Return the learning-rate factor: three cosine falls, each from the full rate."""
    return 0.05 + 0.475 * (1 + math.cos(math.pi * (step % (steps // 3)) / (steps // 3)))


Plan = tuple[Callable[[nn.Module], torch.optim.Optimizer], Callable[[int, int], float]]
PLANS: dict[str, Plan] = {
    "AdamW 1e-3": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), _warm_then_drop),
    "AdamW 1e-2": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), _one_cycle),
    "SGD 5e-2": (lambda m: torch.optim.SGD(m.parameters(), lr=5e-2, momentum=0.9), _warm_then_drop),
    "RMSprop 1e-3": (lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3), _restarts),
    "amsgrad 1e-3": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, amsgrad=True), _one_cycle),
    "Adamax 2e-3": (lambda m: torch.optim.Adamax(m.parameters(), lr=2e-3), _restarts),
    "Adagrad 1e-2": (lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2), _warm_then_drop),
    "centred 1e-3": (lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, centered=True), _one_cycle),
    "Adafactor 1e-2": (lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2), _warm_then_drop),
}

LARGER_PLANS: dict[str, Plan] = {
    "AdamW 3e-4": (lambda m: torch.optim.AdamW(m.parameters(), lr=3e-4), lambda _step, _steps: 1.0),
    "AdamW 1e-3, 0.95": (
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        lambda step, steps: min((step + 1) / 30, 0.55 + 0.45 * math.cos(math.pi * step / steps)),
    ),
    "SGD 5e-2, decay": (
        lambda m: torch.optim.SGD(m.parameters(), lr=5e-2, momentum=0.9, weight_decay=5e-4),
        _warm_then_drop,
    ),
}


def train_step(task: Task, optimizer: Any, scaler: Any) -> Tensor:
    """Take one step of a task; return its loss."""
    total = torch.zeros(())
    for _ in range(task.micro_steps):
        with torch.autocast("cpu", task.dtype, enabled=task.dtype is not None):
            loss = task.loss() / task.micro_steps
        scaler.scale(loss).backward()
        total += loss.detach()
    if task.clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(task.model.parameters(), task.clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if task.after is not None:
        task.after()
    return total


def prepared(name: str, plan: str, seed: int, steps: int) -> tuple[Task, Any, Any, Any]:
    """Return a task with its optimizer, schedule and loss scaler, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = {t.__name__: t for t in [*TASKS, *LARGER]}[name]()
    make, rate = (PLANS | LARGER_PLANS)[plan]
    optimizer = make(task.model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: rate(s, steps))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100, enabled=task.dtype is torch.float16)
    return task, optimizer, schedule, scaler


def run(who: tuple[str, str, str, int, int]) -> tuple[tuple[str, str, str, int, int], list[str]]:
    """Train once; return the summaries of the incidents."""
    name, plan, collect, seed, steps = who
    logging.getLogger("trainsentry").setLevel(logging.CRITICAL + 1)
    os.environ["TRAINSENTRY_REPORT"] = "0"
    task, optimizer, schedule, scaler = prepared(name, plan, seed, steps)
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
        config = {"output_dir": directory, "collect": COLLECT[collect], "on_incident": {"dump": False}}
        if collect != "default":
            config["statistics"] = [*STATISTICS, ALIGNMENT]
        with trainsentry.TrainMonitor(config).watch(task.model, optimizer) as monitor:
            for _ in range(steps):
                rate_now = schedule.get_last_lr()[0]
                monitor.log(loss=train_step(task, optimizer, scaler), learning_rate=rate_now)
                schedule.step()
        gaps = json.loads((Path(directory) / "rank0" / "status.json").read_text())["gaps"]
    lost = [f"the monitor lost records: {gaps}"] if gaps else []
    return who, [*lost, *(incident.summary for incident in monitor.incidents if incident.severity != "note")]


def main() -> None:
    """Run every combination and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0-1")
    parser.add_argument("--tasks", default="")
    parser.add_argument("--plans", default="")
    parser.add_argument("--collect", default=",".join(COLLECT))
    parser.add_argument("--larger", action="store_true")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    plans = options.plans.split(",") if options.plans else list(LARGER_PLANS if options.larger else PLANS)
    names = options.tasks.split(",") if options.tasks else [t.__name__ for t in (LARGER if options.larger else TASKS)]
    collects = options.collect.split(",")
    print(f"{describe_machine()}\n")
    all_runs = list(itertools.product(names, plans, collects, seeds, [options.steps]))
    counts = dict.fromkeys(itertools.product(names, collects), 0)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for who, found in pool.imap(run, all_runs):
            counts[who[0], who[2]] += len(found)
            for line in found:
                print(*who, line, flush=True)
    steps = options.steps * len(plans) * len(seeds)
    print("\n| model | clean steps each | " + " | ".join(collects) + " |\n|---|---|" + "---|" * len(collects))
    for name in names:
        print(f"| {name} | {steps} | " + " | ".join(str(counts[name, c]) for c in collects) + " |")
    totals = " | ".join(str(sum(counts[n, c] for n in names)) for c in collects)
    print(f"| all | {steps * len(names)} | {totals} |")


if __name__ == "__main__":
    main()
