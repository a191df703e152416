"""Trains in forked children that are killed with -9 at random moments; prints what each had handed over by then."""

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from tiny_models import EVERY_STEP, mlp

import trainsentry
import trainsentry.collectors.torch.watch  # before the children are forked, so that each need not load it
import trainsentry.monitor.trainer.wiring


def train(root):
    """Train until killed; note each step whose record has arrived in the ring."""
    torch.set_num_threads(1)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = trainsentry.TrainMonitor({"output_dir": str(root), "collect": EVERY_STEP}).watch(model, optimizer)
    handed = os.open(root.with_suffix(".handed"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for step in range(100_000):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        monitor.log(loss=loss)
        optimizer.step()
        os.write(handed, f"{step}\n".encode())


def has_begun(handed, *, early):
    """Whether the first step of a child has arrived; with `early`, whether it may be on its way."""
    return handed.exists() and (early or handed.stat().st_size > 0)


def main():
    root, times, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    choice = random.Random(seed)
    for n in range(times):
        child = os.fork()
        if child == 0:
            try:
                train(root / f"run{n}")
            except Exception:  # noqa: BLE001 - said here, for nobody else hears of it
                traceback.print_exc()
            os._exit(1)
        end = time.monotonic() + 30
        early = n % 5 == 0
        while not has_begun(root / f"run{n}.handed", early=early) and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(choice.uniform(0.0, 0.4 if early else 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
