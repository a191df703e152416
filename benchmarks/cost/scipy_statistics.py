"""Compares the recorder's own statistics with scipy's: results, time of a call, start of the recorder, memory.

    python benchmarks/cost/scipy_statistics.py [--rounds 5]

trainsentry does without scipy: install it first. The first table has a row for each statistic that scipy has too, with
the largest difference of the results, divided by the largest result. The second starts recorders in turns that import
nothing more, `scipy.special` or `scipy.stats`: time to the first written record, processor time until then, memory.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
import timeit
from collections.abc import Callable
from importlib.metadata import files, version
from pathlib import Path
from typing import Any

import numpy as np
from recorder import Arm
from scipy import ndimage, special, stats
from scipy.spatial import distance

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine

from trainsentry.anomaly.accuracy.output_errors import _cosine
from trainsentry.anomaly.baselines import calibration, score_tail
from trainsentry.anomaly.features import ZEROS_SLACK
from trainsentry.exporters.maps.deviation import WINDOW, _before
from trainsentry.exporters.maps.ranks_map import from_others

RANDOM = np.random.default_rng(0)
Pair = tuple[str, Callable[[], Any], Callable[[], Any]]
IMPORTS = ("numpy", "scipy.special", "scipy.stats")
"""What a recorder imports; numpy it has anyway."""


def tails() -> list[Pair]:
    """Return the pairs of tails and p-values; scores have a power law of index 5, surprises an exponential."""
    tail, odd = score_tail.ScoreTail(), np.array([20.0, 40.0])
    scores = RANDOM.pareto(5.0, 200_000) + 1
    tail.learn(scores)
    reach, *largest = np.sort(scores)[-score_tail.EXCEEDING - 1 :]
    share = len(largest) / len(scores)
    steps = calibration.Calibration()
    for surprise in RANDOM.exponential(0.5, calibration.STEPS):
        steps.learn(surprise)

    def by_pareto() -> Any:
        index = stats.pareto.fit(largest, floc=0, fscale=reach)[0]
        return share * stats.pareto.sf(odd, index, scale=reach)

    def by_expon() -> Any:
        seen = np.asarray(steps._seen)
        start = stats.mstats.mquantiles(seen, [calibration.QUANTILE], alphap=1, betap=1)[0]
        return stats.expon.fit(seen[seen > start], floc=start)[1]

    steps._fit()
    slope, p = steps._slope, [0.02, 0.3, 0.2, 0.4]
    power, steep = (lambda: (odd / reach) ** -5.0), (lambda: stats.pareto.sf(odd, 5.0, 0, reach))
    return [
        ("tail of scores: its index and two p-values", lambda: tail.survival(odd), by_pareto),
        ("the same: the power law alone", power, steep),
        ("p-value of a step: fit of its tail", lambda: steps._fit() or steps._slope, by_expon),
        ("the same: the exponential alone", lambda: math.exp(-1 / slope), lambda: stats.expon.sf(1, 0, slope)),
        ("four p-values as one", lambda: min(1.0, min(p) * len(p)), lambda: stats.combine_pvalues(p, "tippett")[1]),
    ]


def arrays() -> list[Pair]:
    """Return the pairs of array operations."""
    moved = RANDOM.normal(size=(4, 10_000)).astype(np.float32)
    group = np.arange(10_000) % 4
    rows = [np.flatnonzero(group == number) for number in range(4)]
    zeros, picture, outputs = RANDOM.random(10_000), RANDOM.normal(size=(64, 240)), RANDOM.normal(size=(2, 4096))
    ranks, odd, some = RANDOM.lognormal(size=(64, 240)), zeros + ZEROS_SLACK, 1 + 2 * ZEROS_SLACK

    def by_deviation() -> Any:
        spread = stats.median_abs_deviation(ranks, axis=0, scale="normal", nan_policy="omit")
        return (ranks - np.nanmedian(ranks, axis=0)) / np.fmax(spread, np.nanmedian(spread))

    def own_medians() -> Any:
        return np.array([np.median(moved.take(of, axis=1), axis=1) for of in rows]).T

    def by_labels() -> Any:
        return np.array([ndimage.median(line, group, range(4)) for line in moved])

    def by_filter() -> Any:
        return ndimage.median_filter(picture, (1, WINDOW))[:, WINDOW // 2 : -WINDOW // 2]

    return [
        ("medians of four groups, 10,000 rows", own_medians, by_labels),
        ("log-odds of zeros, 10,000 rows", lambda: np.log(odd / (some - odd)), lambda: special.logit(odd / some)),
        ("picture of 64 layers: running medians", lambda: _before(picture)[:, WINDOW:], by_filter),
        ("picture of 64 ranks: robust deviations", lambda: from_others(ranks), by_deviation),
        ("check: cosine of two outputs", lambda: _cosine(*outputs)[0], lambda: 1 - distance.cosine(*outputs)),
    ]


def microseconds(call: Callable[[], Any]) -> float:
    """Return the least time of a call, of seven series of calls."""
    timer = timeit.Timer(call)
    number = max(1, timer.autorange()[0] // 4)
    return min(timer.repeat(7, number)) / number * 1e6


def first_record(part: str) -> tuple[float, float, float]:
    """Start a recorder that imports a part of scipy; return ms to its first record, processor ms, and MB."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "own_rule.py").write_text(f"import {part}\ndef judge(record, table):\n    return []\n")
        os.environ["PYTHONPATH"] = folder
        arm = Arm("process", 2000, folder, detectors=["own_rule:judge"])
        assert arm.link is not None
        process = Path(f"/proc/{arm.link.running.process.pid}/stat")  # type: ignore[attr-defined]
        ticks = sum(int(n) for n in process.read_text().rpartition(")")[2].split()[11:13])
        arm.link.close(60)
        return arm.first_ms, 1000 * ticks / os.sysconf("SC_CLK_TCK"), arm.memory_mb


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    disk = sum(path.stat().st_size for f in files("scipy") or [] if (path := Path(str(f.locate()))).is_file()) / 2**20
    print(f"{describe_machine()}, scipy {version('scipy')} ({disk:.0f} MiB on disk)\n")
    print("| statistic | own (µs) | scipy (µs) | scipy ÷ own | largest difference |\n|---|---|---|---|---|")
    for name, own, other in (*tails(), *arrays()):
        ours, theirs = np.asarray(own()), np.asarray(other())
        apart = float(np.max(np.abs(ours - theirs)) / np.max(np.abs(ours)))
        took = microseconds(own), microseconds(other)
        print(f"| {name} | {took[0]:.1f} | {took[1]:.1f} | {took[1] / took[0]:.1f} | {apart:.1e} |")
    runs = [{part: first_record(part) for part in IMPORTS} for _ in range(options.rounds)]
    print("\n| recorder imports | first record (ms) | processor time (ms) | memory (MB) |\n|---|---|---|---|")
    for part in IMPORTS:
        middle = [statistics.median(run[part][which] for run in runs) for which in range(3)]
        print(f"| {part} | {middle[0]:.0f} | {middle[1]:.0f} | {middle[2]:.0f} |")


if __name__ == "__main__":
    main()
