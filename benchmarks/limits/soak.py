"""Measures resident memory of trainer and recorder over a hundred thousand steps; it must stay flat.

    python benchmarks/limits/soak.py [--steps 100000] [--settings default|everything]

A small model trains on the CPU under the default configuration, or with everything: every quantity at every step, CSV
and TensorBoard, under a disk quota. Prints at 1,000 steps and at every tenth of the run: resident memory of both
processes, and its private part (the shared ring counts in both, but exists once). The run passes when both processes
end within `ALLOWED_GROWTH` of their memory at 1,000 steps.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "cost"))

from machine import describe_machine
from overhead_worker import children
from torch import nn
from torch.nn import functional

import trainsentry

BASE_STEP: Final = 1000
"""Memory must not grow after this step: caches are warm, and every part has run a hundred times."""

ALLOWED_GROWTH: Final = 0.05
"""Allowed growth of resident memory from BASE_STEP to the end, as a share."""

QUANTITIES: Final = ("gradients", "parameters", "optimizer_state", "updates", "activations")

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    "everything": {
        "collect": {part: {"every": 1} for part in QUANTITIES},
        "export": {"csv": {"steps_per_file": 1000}, "tensorboard": True},
        "disk_quota": "1GiB",
    },
}


def memory_mb(pid: int | str) -> tuple[float, float]:
    """Return a process's resident memory in MB, and its private part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(rest.split()[0]) / 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["Rss"], sizes["Private_Clean"] + sizes["Private_Dirty"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, monitor: trainsentry.TrainMonitor, steps: int) -> None:
    """Train on random batches for `steps` steps. Every hundredth waits for the recorder, so that nothing is dropped."""
    for step in range(steps):
        inputs, targets = torch.randn(8, 16), torch.randint(0, 4, (8,))
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        monitor.log(loss=loss)
        optimizer.step()
        if step % 100 == 99:
            monitor.flush()


def soak(steps: int, settings: Mapping[str, Any], directory: str) -> dict[str, tuple[float, float]]:
    """Train and print a line at each stop; return each process's resident memory at BASE_STEP and at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = trainsentry.TrainMonitor({"output_dir": directory, **settings}).watch(model, optimizer)
    (recorder,) = children()
    stops = sorted({BASE_STEP, *range(steps // 10, steps + 1, max(steps // 10, 1))})
    done, begin = 0, (0.0, 0.0)
    print("| steps | trainer (MB) | its own | recorder (MB) | its own | µs a step |\n|---|---|---|---|---|---|")
    for stop in stops:
        started = time.perf_counter()
        train(model, optimizer, monitor, stop - done)
        monitor.flush()
        took = 1e6 * (time.perf_counter() - started) / (stop - done)
        (rss, own), (recorder_rss, recorder_own) = memory_mb("self"), memory_mb(recorder)
        print(f"| {stop} | {rss:.1f} | {own:.1f} | {recorder_rss:.1f} | {recorder_own:.1f} | {took:.0f} |", flush=True)
        begin = begin if done else (rss, recorder_rss)
        done = stop
    monitor.close()
    return {"trainer": (begin[0], rss), "recorder": (begin[1], recorder_rss)}


def main() -> None:
    """Run the benchmark; exit with status 1 if memory has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--settings", choices=sorted(SETTINGS), default="default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        found = soak(options.steps, SETTINGS[options.settings], directory)
    grown = {who: end / begin - 1 for who, (begin, end) in found.items()}
    for who, share in grown.items():
        print(f"\n{who}: {share:+.1%} from step {BASE_STEP} to the end, allowed {ALLOWED_GROWTH:.0%}.")
    print(f"\n{describe_machine()}")
    sys.exit(any(share > ALLOWED_GROWTH for share in grown.values()))


if __name__ == "__main__":
    main()
