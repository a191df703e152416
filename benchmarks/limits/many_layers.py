"""Measures the cost of `watch` on a model of 5,000 layers: CPU seconds, and memory of trainer and recorder.

    python benchmarks/limits/many_layers.py [--layers 5000]

torch and the monitor's modules in the trainer are imported before the clock starts.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ["TRAINSENTRY_REPORT"] = "0"

import sys

import torch

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine
from torch import nn

import trainsentry
from trainsentry.monitor.frameworks import framework_of


def megabytes(process: int | str = "self") -> float:
    """Return the resident memory of a process in MB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    """Watch, train three steps, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5000)
    layers = parser.parse_args().layers
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 4)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    framework_of(model)
    print(describe_machine())
    with tempfile.TemporaryDirectory() as out:
        before, began = megabytes(), time.process_time()
        monitor = trainsentry.TrainMonitor({"output_dir": out}).watch(model, optimizer)
        print(f"watch, {layers} layers: {time.process_time() - began:.2f} s, {megabytes() - before:.0f} MB")
        for _ in range(3):
            step()
        monitor.flush()
        recorder = monitor._loop.link.running.process.pid  # type: ignore[union-attr,attr-defined]
        print(f"after three steps: trainer +{megabytes() - before:.0f} MB, recorder {megabytes(recorder):.0f} MB")
        monitor.close()


if __name__ == "__main__":
    main()
