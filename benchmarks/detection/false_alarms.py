"""Compares the rate of false alarms with the allowed one, on correlated noise with heavy tails.

    python benchmarks/detection/false_alarms.py [--series 1000] [--steps 10000]

Every incident is a false alarm. The allowed rate is an upper bound; a rate far below it would lose sensitivity.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine
from synthetic_records import Stream

from trainsentry.anomaly.baselines.false_alarms import Allowed
from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incidents.incident_log import IncidentLog


def count(series: int, steps: int, asked: float, seed: int) -> int:
    """Return the number of incidents in a healthy run; `asked` is the allowed number in a thousand steps."""
    stream = Stream(series, seed)
    detection = Detection(stream.table, Allowed(per_step=asked / 1000))
    log = IncidentLog(stream.table)
    for _ in range(steps):
        record = stream.record(stream.sizes())
        log.observe(record.step, detection.judge(record))
    return len(log.incidents)


def main() -> None:
    """Print the rate for several settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--asked", default="1,5", help="false alarms in a thousand steps")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    print(f"{describe_machine()}\n")
    print("| asked (in 1,000 steps) | series · steps | incidents | measured (in 1,000 steps) | ÷ asked |")
    print("|---|---|---|---|---|")
    for asked in map(float, options.asked.split(",")):
        found = sum(count(options.series, options.steps, asked, seed) for seed in range(options.seeds))
        rate = 1000 * found / (options.steps * options.seeds)
        size = f"{options.series * options.steps * options.seeds:.2g}"
        print(f"| {asked:g} | {size} | {found} | {rate:.2f} | {rate / asked:.2f} |", flush=True)


if __name__ == "__main__":
    main()
