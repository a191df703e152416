"""Measures what the fingerprints of a checkpoint cost, beside torch.save of the same checkpoint.

    python benchmarks/cost/fingerprints.py [--layers 14] [--width 768] [--rounds 7]

A GPT of about 100 million parameters and AdamW, on the CPU. The monitor's `state_dict()` reads weights and both
moments, three large tensors a parameter; torch.save writes the same to a file in the temp directory. Both are timed in
turns; the table has their medians. The last row is the first update after a resume, which reads and compares, less the
update after it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

from gpt import Gpt, Preset
from machine import describe_machine

import trainsentry

COLLECT = {"parameters": {"every": 1_000_000}}
"""Nothing is sampled in these steps, so that the update is timed alone."""


def seconds(function: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return the seconds of an update with gradients of one."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return seconds(optimizer.step)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    model = Gpt(Preset(chosen.layers, chosen.width, 12, 128, 1, 1024, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    taken: dict[str, list[float]] = {"save": [], "without": [], "with": [], "resumed": []}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "checkpoint.pt"
        config = {"output_dir": folder, "collect": COLLECT}
        with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
            loop = monitor._loop
            assert loop is not None
            step(model, optimizer)
            for _ in range(chosen.rounds):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                taken["save"].append(seconds(partial(torch.save, state, path)))
                check, loop.checkpoint = loop.checkpoint, type(loop.checkpoint)(None, None, loop.guard, loop.link)
                taken["without"].append(seconds(monitor.state_dict))
                loop.checkpoint = check
                taken["with"].append(seconds(monitor.state_dict))
                monitor.load_state_dict(monitor.state_dict())
                first = step(model, optimizer)
                taken["resumed"].append(first - step(model, optimizer))
            text, stored = monitor.state_dict()["fingerprints"], path.stat().st_size
    report(model, {key: statistics.median(values) for key, values in taken.items()}, len(text), stored)


def report(model: torch.nn.Module, taken: dict[str, float], text: int, stored: int) -> None:
    """Print the medians and the sizes."""
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    own = taken["with"] - taken["without"]
    print(f"{millions:.0f} million parameters in {len(list(model.parameters()))} tensors, AdamW\n")
    print("| | seconds | of torch.save |\n|---|---|---|")
    for words, value in (
        ("torch.save", taken["save"]),
        ("state_dict() without fingerprints", taken["without"]),
        ("the fingerprints in state_dict()", own),
        ("the comparison at the first update after a resume", taken["resumed"]),
    ):
        print(f"| {words} | {value:.3f} | {value / taken['save']:.0%} |")
    print(f"\nThe checkpoint has {stored / 2**20:.0f} MiB, its fingerprints {text / 2**10:.0f} KiB.")
    print(f"\n{describe_machine()}")


if __name__ == "__main__":
    main()
