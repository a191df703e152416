"""The host's milliseconds of a step that samples and of one that does not, beside those of a bare step.

    python benchmarks/cost/host_steps.py [--device auto] [--rounds 3] [--tiny]

Where a step is bound by launches, this is what a monitor costs. The 6-layer GPT of the device benchmark trains without
a monitor, with the default configuration, and with one part at every step, in turns in one process. Each step is timed
on the host alone; after every ten the host waits for the device. Medians: of the default configuration, which samples
every tenth step, apart for steps with and without samples.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent / "on_device")]

from device_trainings import GPT, Training, trainings
from device_work import find_device, name_of, synchronize
from machine import describe_machine

import trainsentry

CYCLE = 10
"""Steps from one sample of the default configuration to the next."""

STEPS = 6 * CYCLE
PARTS = ("gradients", "optimizer_state", "parameters", "updates", "activations", "communication")


def one_part(part: str) -> dict[str, Any]:
    """Return a configuration that collects one part at every step."""
    return {"collect": {each: {"every": 1} if each == part else False for each in PARTS}}


ARMS: dict[str, dict[str, Any] | None] = {"no monitor": None, "default": {}, "nothing collected": one_part("")}
ARMS |= {part: one_part(part) for part in ("gradients", "parameters", "optimizer_state", "activations")}


def begin(training: Training, config: dict[str, Any] | None, directory: str) -> Any:
    """Watch a training and warm it up; return the monitor, None for none."""
    monitor = None
    if config is not None:
        given = {"output_dir": directory, "on_incident": False, **config}
        monitor = trainsentry.TrainMonitor(given).watch(training.model, training.optimizer)
    for _ in range(CYCLE + 3):
        training.step()
    return monitor


def times_of(training: Training, device: torch.device) -> list[float]:
    """Return the host's milliseconds of each of some steps."""
    found = []
    synchronize(device)
    for step in range(STEPS):
        start = time.perf_counter()
        training.step()
        found.append(1e3 * (time.perf_counter() - start))
        if step % CYCLE == CYCLE - 1:
            synchronize(device)
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, which checks the script")
    options = parser.parse_args()
    device = find_device(options.device)
    if device is None:
        print("No accelerator: torch finds none here, so nothing was measured (--tiny --device cpu checks the script).")
        return
    logging.getLogger("trainsentry").setLevel(logging.ERROR)
    print(f"{name_of(device)}; {describe_machine()}\n")
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as directory:
        made = {name: trainings(device, tiny=options.tiny)[GPT]() for name in ARMS}
        monitors = [begin(made[name], config, f"{directory}/{name}") for name, config in ARMS.items()]
        for _ in range(options.rounds):
            for name, training in made.items():
                times[name] += times_of(training, device)
        for monitor in monitors:
            if monitor is not None:
                monitor.close()
    print(table(times))


def table(times: dict[str, list[float]]) -> str:
    """Return the medians, and what each adds to the step without a monitor."""
    bare = statistics.median(times["no monitor"])
    lines = ["| collected | host ms a step | added |", "|---|---|---|", f"| no monitor | {bare:.2f} | |"]
    for name, found in times.items():
        if name == "default":  # the step of a cycle that samples takes the longest
            by_place = sorted(statistics.median(found[place::CYCLE]) for place in range(CYCLE))
            kinds = {"default, no sample": statistics.median(by_place[:-1]), "default, sample": by_place[-1]}
        else:
            kinds = {name: statistics.median(found)} if name != "no monitor" else {}
        lines += [f"| {kind} | {value:.2f} | {value - bare:+.2f} |" for kind, value in kinds.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
