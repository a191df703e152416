"""Measures the detectors' cost: milliseconds of one core per record, and bytes of memory per series.

python benchmarks/cost/detection_cost.py [--series 10000] [--steps 60]
"""

import argparse
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine
from synthetic_records import Stream

from trainsentry.anomaly.detection import Detection


def main() -> None:
    """Print milliseconds per record and bytes per series."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=10000)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    stream = Stream(options.series, 0)
    records = [stream.record(stream.sizes()) for _ in range(options.steps + 80)]
    tracemalloc.start()
    detection = Detection(stream.table)
    for record in records[:80]:  # past the warm-up: later records cost the same
        detection.judge(record)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    took = []
    for record in records[80:]:
        start = time.process_time()
        detection.judge(record)
        took.append(1000 * (time.process_time() - start))
    print(f"{describe_machine()}\n")
    low, middle, high = np.quantile(took, [0.1, 0.5, 0.9])
    print(f"{options.series} series × 7 statistics: {middle:.1f} ms a record (10 % to 90 %: {low:.1f} to {high:.1f})")
    print(f"memory: {held / options.series:.0f} bytes a series, the last records' scores included")


if __name__ == "__main__":
    main()
