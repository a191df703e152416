"""Measures what a busy, niced process adds to a training step, in a session of its own and in the trainer's session.

    python benchmarks/cost/niced_neighbour.py

The result is why the recorder gets its own process group, not its own session. Two torch threads share two cores with
a process that spins at `nice` 10. Prints the mean step time of each arrangement, measured twice.
"""

import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine

SPIN = "import os, sys\nos.nice(10)\nif sys.argv[1] == 'group': os.setpgid(0, 0)\nwhile True: pass"
"""The neighbour, which is never idle."""

model = torch.nn.Sequential(*(torch.nn.Linear(192, 192) for _ in range(12)))
batch = torch.randn(768, 192)


def step_ms(steps: int = 60) -> float:
    """Return the mean time of a forward and backward pass in milliseconds."""
    start = time.perf_counter()
    for _ in range(steps):
        model(batch).sum().backward()
    return (time.perf_counter() - start) / steps * 1000


def main() -> None:
    """Measure alone and with each kind of neighbour, and print the table."""
    torch.set_num_threads(2)
    step_ms(10)
    print(f"{describe_machine()}\n\n| neighbour | step (ms), twice |\n|---|---|")
    print(f"| none | {step_ms():.0f}, {step_ms():.0f} |")
    for kind in ("session", "group"):
        neighbour = subprocess.Popen([sys.executable, "-c", SPIN, kind], start_new_session=kind == "session")
        time.sleep(0.5)
        print(f"| in a {kind} of its own | {step_ms():.0f}, {step_ms():.0f} |", flush=True)
        neighbour.kill()
        neighbour.wait()


if __name__ == "__main__":
    main()
