"""Measures what watching adds to a collective: µs of the training process per call, in sampled and other steps.

    python benchmarks/cost/collective_calls.py [--calls 3000] [--rounds 7]

torch's fake process group does nothing, so only Python time is measured, the monitor's and torch's. Tensors have 64
elements, so that a sampled call reads almost nothing. Bare and watched rounds alternate; the minimum of each counts.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.torch.distributed.communication import MAX_CALLS, CollectiveRows
from trainsentry.collectors.torch.rows.step_rows import StepRows

SMALL, LARGE = torch.ones(64), torch.ones(256)


def _gather_and_wait() -> None:
    work = dist.all_gather_into_tensor(LARGE, SMALL, async_op=True)
    assert work is not None
    work.wait()


CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(SMALL),
    "all_gather_into_tensor, waited for": _gather_and_wait,
    "barrier": dist.barrier,
}


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Return the mean time of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - start) / calls


def watched(call: Callable[[], object], calls: int, *, sampling: bool) -> float:
    """Return the mean time of a watched call; a step has as many calls as a record holds."""
    rows = StepRows(SeriesTable())
    watch = CollectiveRows(rows, Guard(), own="")
    watch.open_step(sampling=sampling)
    took = []
    for _ in range(max(calls // MAX_CALLS, 1)):
        took.append(microseconds(call, MAX_CALLS))
        rows.drop()
        watch.open_step(sampling=sampling)
    watch.close()
    return sum(took) / len(took)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # torch renames its collectives
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    print(f"{describe_machine()}\n\n| call | bare (µs) | added, not sampled (µs) | added, sampled (µs) |")
    print("|---|---|---|---|")
    for name, call in CALLS.items():
        bare, counted, sampled = [], [], []
        for _ in range(options.rounds):
            bare.append(microseconds(call, options.calls))
            counted.append(watched(call, options.calls, sampling=False))
            sampled.append(watched(call, options.calls, sampling=True))
        least = min(bare)
        print(f"| {name} | {least:.1f} | {min(counted) - least:.1f} | {min(sampled) - least:.1f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
