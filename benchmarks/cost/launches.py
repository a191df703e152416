"""Counts what the device path does in a step, without a device: launches, pinned allocations, Python calls, host time.

    python benchmarks/cost/launches.py [--steps 30]

Rows of CPU tensors are kept as on an accelerator, and the kernels are replaced by ones that only count. Models: the
GPTs of the cost benchmarks, trained by AdamW, everything collected at each step, one part after another. Host time is
the monitor's own in the hooks, by `time.perf_counter`, a tensor; Python calls are those inside the monitor's files.
Nothing is computed again (`recompute`): that is no reading, and `overhead.py` prices it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from triton import language as tl

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine

import trainsentry
from trainsentry.collectors.torch import watch
from trainsentry.collectors.torch.rows import device_rows, step_rows
from trainsentry.monitor.demo.model import Gpt, GptConfig

PARTS = ("gradients", "parameters", "optimizer_state", "updates", "activations")
MODELS = {"GPT 6×384": GptConfig(layers=6, width=384), "GPT 48×128": GptConfig(layers=48, width=128, heads=4)}


class Kernels:
    """Stands in for the Triton kernels: a launch is counted and writes nothing."""

    tl = tl
    PARTIAL_COLUMNS = 16

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        self.launches += 1

    @property
    def partial_rows(self) -> "Kernels":
        """The kernel, which is this object: `kernel[grid](...)` launches."""
        return self

    combine_rows = partial_rows


@contextmanager
def counted() -> Iterator[Kernels]:
    """Keep rows as on a device, and count launches."""
    kernels = Kernels()
    before = watch.StepRows, device_rows.kernels_for

    def rows(*args: Any, **kwargs: Any) -> Any:
        return step_rows.StepRows(*args, **kwargs, device_rows_on_cpu=True)

    watch.StepRows, device_rows.kernels_for = rows, lambda _: kernels  # type: ignore[assignment, misc]
    try:
        yield kernels
    finally:
        watch.StepRows, device_rows.kernels_for = before  # type: ignore[misc]


class Clock:
    """Adds up the time inside calls of some functions, and counts the Python calls made there."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self.count_calls = False
        self._depth = 0

    def timed(self, function: Any) -> Any:
        """Return a function that adds its time and calls, unless another one is under way."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            self._depth = 1
            if self.count_calls:
                sys.setprofile(self._count)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                sys.setprofile(None)
                self._depth = 0

        return run

    def _count(self, frame: Any, event: str, _: Any) -> None:
        self.calls += event == "call"


READERS = ("add", "add_many", "add_shared", "add_parameters", "add_scalar", "norms", "peek", "take", "read_gathered")


def measure(config: GptConfig, part: str, steps: int) -> dict[str, float]:
    """Return launches and Python calls a step, tensors a step, and the best microseconds a tensor."""
    torch.manual_seed(0)
    model: nn.Module = Gpt(config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.randint(256, (1, 9))
    collect: dict[str, Any] = {p: {"every": 1} if p == part else False for p in PARTS} | {"communication": False}
    if part == "activations":
        collect[part]["recompute"] = False
    settings = {"output_dir": tempfile.mkdtemp(), "collect": collect, "detect": False, "on_incident": False}
    with counted() as kernels:
        monitor = trainsentry.TrainMonitor(settings).watch(model, optimizer)
        rows: Any = monitor._loop.watch.rows  # type: ignore[union-attr]
        clock = Clock()
        for name in READERS:
            if hasattr(rows, name):
                setattr(rows, name, clock.timed(getattr(rows, name)))

        def step() -> tuple[float, int, int, int]:
            clock.seconds, clock.calls, before = 0.0, 0, kernels.launches
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            return clock.seconds, kernels.launches - before, clock.calls, 0

        for _ in range(4):
            step()
        seconds = [step()[0] for _ in range(steps)]
        clock.count_calls = True
        _, launches, calls, _ = step()
        tensors = len(monitor.records(last=1))
        monitor.close()
    return {
        "tensors": tensors,
        "launches": launches,
        "calls": calls / tensors,
        "microseconds": 1e6 * min(seconds) / tensors,
        "median": 1e6 * statistics.median(seconds) / tensors,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | collected | tensors | launches | calls a tensor | host µs a tensor, least (median) |")
    print("|---|---|---|---|---|---|")
    for name, config in MODELS.items():
        for part in PARTS:
            found = measure(config, part, options.steps)
            print(
                f"| {name} | {part} | {found['tensors']:.0f} | {found['launches']:.0f} | {found['calls']:.1f} | "
                f"{found['microseconds']:.2f} ({found['median']:.2f}) |",
                flush=True,
            )
    print(f"\n{describe_machine()}")


if __name__ == "__main__":
    main()
