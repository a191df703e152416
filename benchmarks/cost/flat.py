"""Measures memory of trainer and recorder, and the cost of a step, over thousands of steps: all must stay flat.

    python benchmarks/cost/flat.py [--steps 10000] [--parameters 2500]

AdamW trains a model of `--parameters` small tensors; gradients, weights and both moments of each are recorded at every
step: four series a parameter, 10,000 in all, scored and written as CSV under a disk quota of 2 GiB. At intervals it
prints resident memory of both processes, the median step, the time the monitor added to it (including waits for space
in the ring), and the size of all files; at the end, the median step with the recorder busy and with it idle.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine
from overhead_worker import children
from torch import nn

import trainsentry


def resident_mb(pid: int | str) -> float:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


class Many(nn.Module):
    """Many small weights; the loss is the sum of their squared distances from a random target."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(count))

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        stacked = torch.stack(tuple(self.weights))
        return (stacked - torch.randn_like(stacked)).square().sum()


def train(model: Many, optimizer: torch.optim.Optimizer, monitor: trainsentry.TrainMonitor, steps: int) -> list[float]:
    """Train; return the seconds of each step. Every hundredth waits for the recorder, so that nothing is dropped."""
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        if step % 100 == 99:
            monitor.flush()
    return seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--parameters", type=int, default=2_500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Many(options.parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    every_step = {part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state")}
    with tempfile.TemporaryDirectory() as directory:
        config = {
            "output_dir": directory,
            "collect": {**every_step, "updates": False, "activations": False, "communication": False},
            "disk_quota": "2GiB",
            "ring_size": "64MiB",
        }
        monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)
        (recorder,) = children()
        print(
            "| steps | trainer (MB) | recorder (MB) | step (ms) | added (ms) | files (MB) |\n|---|---|---|---|---|---|"
        )
        guard, block = monitor._guard, max(options.steps // 20, 1)
        for done in range(block, options.steps + 1, block):
            spent = guard.spent_ns
            seconds = train(model, optimizer, monitor, block)
            added = (guard.spent_ns - spent) / 1e6 / block
            memory = f"{resident_mb('self'):.1f} | {resident_mb(recorder):.1f}"
            files = sum(f.stat().st_size for f in Path(directory).rglob("*") if f.is_file()) / 1e6
            row = f"{1e3 * statistics.median(seconds):.1f} | {added:.2f} | {files:.0f}"
            print(f"| {done} | {memory} | {row} |", flush=True)
        busy = train(model, optimizer, monitor, 50)
        idle = []
        for _ in range(50):
            monitor.flush()
            idle += train(model, optimizer, monitor, 1)
        print(f"\nStep while the recorder is busy: {1e3 * statistics.median(busy):.1f} ms; idle before it: ", end="")
        print(f"{1e3 * statistics.median(idle):.1f} ms. Dropped records: {monitor._loop.link.dropped}.")
        monitor.close()
    print(f"\n{describe_machine()}")


if __name__ == "__main__":
    main()
