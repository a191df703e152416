"""Compares the recorder as a process with the recorder as a thread: step time, start-up time, memory.

    python benchmarks/cost/recorder.py [--rounds 5] [--steps 300] [--ops 1200] [--series 2000] [--matmul] [--threads 1]

A launch-bound loop (`--ops` small torch operations a step on one thread, or large products with `--matmul`, on
`--threads` threads) sends a record of `--series` rows at every step, which the recorder scores and writes as CSV, so
that the writer is always busy. Three arms alternate in blocks: no recorder, a thread, a process. Prints the mean step
time, the ratio to the bare loop of the same round (median, minimum, maximum), the time until `start` returns, the time
until the first record is written, and the recorder's memory.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Layout, Series, SeriesTable
from trainsentry.collectors.statistics import COLUMNS
from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.recorder.sinks.claim import Claim
from trainsentry.monitor.recorder.start import ProcessRecorder, ThreadRecorder
from trainsentry.monitor.trainer.wiring import recorder_settings

STARTERS = {"thread": ThreadRecorder, "process": ProcessRecorder}


def resident(pid: str = "self") -> float:
    """Return the resident memory of a process in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def make_record(table: SeriesTable, series: int) -> StepRecord:
    """Return a record of `series` rows of plausible numbers."""
    rng = np.random.default_rng(0)
    ids = [table.series_id(Series(f"layers.{i // 8}.part{i % 8}.weight", "gradient")) for i in range(series)]
    layout = table.layout_id(Layout((64, 64), "float32", 4096))
    values = np.abs(rng.standard_normal((series, COLUMNS))) + 0.1
    values[:, 4:7] = 0.0
    return StepRecord(0, 0, np.asarray(ids, np.int32), np.full(series, layout, np.int32), values)


def loop(steps: int, ops: int, link: RecorderLink | None, record: StepRecord, first: int) -> float:
    """Run the loop; return its mean step time in milliseconds. With `ops` = 0 it multiplies large matrices."""
    x, weight = torch.ones(16), torch.randn(192, 192)
    batch = torch.randn(768, 192)
    times = []
    for step in range(first, first + steps):
        start = time.perf_counter()
        for _ in range(ops):
            x = x * 1.0
        for _ in range(0 if ops else 40):
            torch.relu(batch @ weight)
        if link is not None:
            part = StepRecord(step, 0, record.ids, record.layouts, record.values)
            link.send_record(part)
            link.poll()
        times.append(time.perf_counter() - start)
    return statistics.fmean(times) * 1000


class Arm:
    """One kind of recorder, which runs through all rounds."""

    def __init__(self, mode: str, series: int, directory: str, detectors: Sequence[str] = ()) -> None:
        self.table = SeriesTable()
        self.record = make_record(self.table, series)
        self.link: RecorderLink | None = None
        self.start_ms = self.first_ms = self.memory_mb = 0.0
        if mode == "none":
            return
        before = resident()
        config = load_config({"disk_quota": "1TiB", "ring_size": "16MiB", "detect": {"detectors": [*detectors]}})
        settings = recorder_settings(config, Path(directory) / mode, 0, 0, Claim(None, 0))
        start = time.perf_counter()
        self.link = RecorderLink(settings, self.table, STARTERS[mode])
        self.start_ms = (time.perf_counter() - start) * 1000
        self.link.send_record(self.record)
        self.link.ask(messages.FLUSH, messages.FLUSHED, 60)
        self.first_ms = (time.perf_counter() - start) * 1000
        running = self.link.running
        own = isinstance(running, ProcessRecorder)
        self.memory_mb = resident(str(running.process.pid)) if own else resident() - before  # type: ignore[attr-defined]


def main() -> None:
    """Run the arms alternately and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("steps", 300), ("ops", 1200), ("series", 2000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--matmul", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    ops = 0 if options.matmul else options.ops
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        arms = {mode: Arm(mode, options.series, directory) for mode in ("none", "thread", "process")}
        times: dict[str, list[float]] = {mode: [] for mode in arms}
        for round_ in range(options.rounds):
            for mode, arm in arms.items():
                first = 1 + round_ * options.steps
                times[mode].append(loop(options.steps, ops, arm.link, arm.record, first))
                if arm.link is not None:
                    arm.link.ask(messages.FLUSH, messages.FLUSHED, 120)
        print(f"{describe_machine()}\n{options}\n")
        print("| recorder | step (ms) | ÷ bare | start returns (ms) | first record written (ms) | memory (MB) |")
        print("|---|---|---|---|---|---|")
        for mode, arm in arms.items():
            ratios = [a / b for a, b in zip(times[mode], times["none"], strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
            own = f"{arm.start_ms:.0f} | {arm.first_ms:.0f} | {arm.memory_mb:.0f}"
            print(f"| {mode} | {statistics.median(times[mode]):.2f} | {spread} | {own} |")
            if arm.link is not None:
                arm.link.close(60)


if __name__ == "__main__":
    main()
