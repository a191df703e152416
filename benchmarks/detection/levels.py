"""Measures how near healthy runs come to the bounds of `anomaly/baselines/levels/level_shifts.py` and `loss_level.py`.

    python benchmarks/detection/levels.py [--steps 200] [--seed 1000] [--tasks spirals,images] [--plans "AdamW 1e-3"]

Trains the models of the clean runs with everything collected at every step, and judges what was recorded. Printed are,
for each quantity, the runs that came nearest: 1 and more would be an alarm.
"""

import argparse
import contextlib
import io
import logging
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from clean_runs import EVERYTHING, prepared, train_step
from clean_tasks import TASKS
from larger_tasks import LARGER
from machine import describe_machine

import trainsentry
from trainsentry.anomaly.baselines.levels import loss_level
from trainsentry.anomaly.baselines.levels.level_shifts import LevelShifts
from trainsentry.anomaly.baselines.levels.rank_test import LEAST_SHARE, OLD, share_above
from trainsentry.anomaly.detection import Detection
from trainsentry.collectors.series import SeriesTable
from trainsentry.monitor.offline.history import records_of

DEFAULT_PLANS = ("AdamW 1e-3", "SGD 5e-2", "AdamW 1e-2", "RMSprop 1e-3", "Adafactor 1e-2")
Nearest = dict[str, tuple[float, str]]


class Nearness(LevelShifts):
    """Notes the largest reach of each quantity, and tells of none."""

    def __init__(self, arrays: Any) -> None:
        super().__init__(arrays)
        self.nearest: Nearest = {}

    def _reach(self, ids: Any, rise: Any, fall: Any) -> Any:
        reach = super()._reach(ids, rise, fall)
        largest = reach.max(axis=0)
        for i in np.argsort(-largest)[:8].tolist():
            series = self._table.series[ids[i]]
            if largest[i] > self.nearest.get(series.quantity, (0.0, ""))[0]:
                self.nearest[series.quantity] = float(largest[i]), series.name
        return np.zeros_like(reach)


def record(name: str, plan: str, seed: int, steps: int, directory: str) -> None:
    """Train one model without detection."""
    task, optimizer, schedule, scaler = prepared(name, plan, seed, steps)
    config = {"output_dir": directory, "collect": EVERYTHING, "detect": False, "on_incident": {"dump": False}}
    with contextlib.redirect_stderr(io.StringIO()), trainsentry.TrainMonitor(config).watch(task.model, optimizer) as m:
        for _ in range(steps):
            m.log(loss=train_step(task, optimizer, scaler))
            schedule.step()


def nearest_in(directory: str) -> Nearest:
    """Judge the records of a run; return how near each quantity came to its bound, and the series."""
    table = SeriesTable()
    detection = Detection(table)
    levels = detection._outliers._levels = Nearness(detection._arrays)
    shares = [0.0]
    before = loss_level._risen

    def note(known: Any, *_: int) -> None:
        losses = np.array([loss for _, loss in known.newest])
        old, new = losses[:OLD], losses[OLD:]
        if np.median(new) >= loss_level.LEAST_RISE * np.median(old):
            shares.append(share_above(old, new))

    loss_level._risen = note  # type: ignore[assignment]
    try:
        for step_record in records_of(Path(directory) / "rank0", table, lambda *_: None):
            detection.judge(step_record)
    finally:
        loss_level._risen = before
    return levels.nearest | {"loss, by rank": (max(shares) / LEAST_SHARE, "loss")}


def main() -> None:
    """Run every combination, and print the nearest runs of each quantity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--tasks", default="")
    parser.add_argument("--plans", default=",".join(DEFAULT_PLANS))
    options = parser.parse_args()
    logging.getLogger("trainsentry").setLevel(logging.CRITICAL + 1)
    os.environ["TRAINSENTRY_REPORT"] = "0"
    names = options.tasks.split(",") if options.tasks else [t.__name__ for t in TASKS]
    numbers = {t.__name__: i for i, t in enumerate([*TASKS, *LARGER])}
    found: dict[str, list[tuple[float, str, str, str]]] = defaultdict(list)
    runs = 0
    for plan in options.plans.split(","):
        for name in names:
            with tempfile.TemporaryDirectory() as directory:
                record(name, plan, options.seed + numbers[name], options.steps, directory)
                for quantity, (reach, series) in nearest_in(directory).items():
                    found[quantity].append((reach, name, plan, series))
            runs += 1
            print(f"{runs} {plan}: {name}", file=sys.stderr, flush=True)
    print(
        f"{runs} runs of {options.steps} steps\n\n| quantity | nearest | model | plan | series |\n|---|---|---|---|---|"
    )
    for quantity, reached in sorted(found.items()):
        for reach, name, plan, series in sorted(reached, reverse=True)[:3]:
            print(f"| {quantity} | {reach:.2f} | {name} | {plan} | {series} |")
    print(f"\n{describe_machine()}")


if __name__ == "__main__":
    main()
