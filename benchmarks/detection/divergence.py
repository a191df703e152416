"""Measures how soon a real divergence is flagged among ten thousand series of noise; the aim is its second value.

    python benchmarks/detection/divergence.py [--seeds 200] [--series 10000]

The gradient norm and the loss of BLOOM's published log (tr11, from iteration 31214 on) follow a calm history of 500
values (log-deviation 0.2, Student's t noise of four degrees of freedom) whose median is `--level`.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine
from synthetic_records import Stream

from trainsentry.anomaly.detection import Detection

GRAD_NORM = (0.242, 0.947, 2.39, 15.9, 145.0, 960.0, 353.0, 379.0, 650.0)
LOSS = (2.199, 2.220, 2.595, 2.242, 2.345, 5.098, 3.49, 3.21, 2.80)
HISTORY = 500


def first_flags(series: int, seed: int, level: float) -> tuple[int | None, int | None]:
    """Return the number, from one, of the value that flagged the gradient norm, and of the one that raised an alarm."""
    stream = Stream(series, seed)
    detection = Detection(stream.table)
    flag = alarm = None
    for step in range(HISTORY + len(GRAD_NORM)):
        sizes = stream.sizes()
        noise = stream.random.standard_t(4, 2) / 2**0.5
        sizes[-2:] = np.array([2.2, level]) * np.exp(np.array([0.02, 0.2]) * noise)
        if step >= HISTORY:
            sizes[-2:] = LOSS[step - HISTORY], GRAD_NORM[step - HISTORY]
        found = detection.judge(stream.record(sizes))
        if step < HISTORY:
            continue
        if flag is None and any(a.name == "grad_norm" for a in found):
            flag = step - HISTORY + 1
        if alarm is None and any(a.alarm for a in found):
            alarm = step - HISTORY + 1
    return flag, alarm


def main() -> None:
    """Print how often each value was the first flagged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--series", type=int, default=10000)
    parser.add_argument("--level", type=float, default=0.15)
    options = parser.parse_args()
    print(f"{describe_machine()}\n")
    found = [first_flags(options.series, seed, options.level) for seed in range(options.seeds)]
    for name, place in (("flagged", 0), ("alarm", 1)):
        values = [f[place] if f[place] is not None else 99 for f in found]
        shares = ", ".join(f"by value {n}: {np.mean(np.array(values) <= n):.1%}" for n in (1, 2, 3, 4))
        print(f"grad norm {name}: {shares}")


if __name__ == "__main__":
    main()
