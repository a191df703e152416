"""Measures whole runs under ZeRO 0 to 3 and FSDP1 with the monitor and the debugger: a table for RESULTS.md.

    python benchmarks/cost/zero.py [--steps 100] [--rounds 3] [--strategies Zero1,Fsdp1]

Two ranks on this machine, gloo, one thread each, an MLP of 4.6 million parameters. A run begins before the model is
wrapped and ends when everything is closed on both ranks, so it has the recorders' start and end in it. Each number is
the median of the rounds, over that of the bare runs of the same rounds: alone, and while two other processes compute.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "workers"))

import strategy_steps
from debugged_ranks import SUBJECTS

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine
from rank_pool import RankPool

NAMES = {"DeepSpeed": "ZeRO 0", "Zero1": "ZeRO 1", "Zero2": "ZeRO 2", "Zero3": "ZeRO 3", "Fsdp1": "FSDP1"}


def compute() -> None:
    """Keep a core busy."""
    while True:
        sum(range(1000))


def seconds_of(pool: RankPool, name: str, steps: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of a run under each subject."""
    found: dict[str, list[float]] = {subject: [] for subject in SUBJECTS}
    for _ in range(rounds):
        for subject, seconds in found.items():
            with tempfile.TemporaryDirectory() as out:
                seconds.append(max(pool.run(strategy_steps.whole_run, name, Path(out), subject, steps, timeout=600)))
    return {subject: statistics.median(seconds) for subject, seconds in found.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategies", default=",".join(NAMES))
    given = parser.parse_args()
    print("| strategy | machine | bare run, s | " + " | ".join(SUBJECTS[1:]) + " |")
    print("|---|---|---|" + "---|" * len(SUBJECTS[1:]))
    pool = RankPool(2)
    pool.run(strategy_steps.whole_run, "Zero3", Path(tempfile.mkdtemp()), "bare", 2, timeout=600)  # DeepSpeed begins
    for name in given.strategies.split(","):
        for machine in ("alone", "loaded"):
            busy = [multiprocessing.Process(target=compute, daemon=True) for _ in range(2 * (machine == "loaded"))]
            for process in busy:
                process.start()
            found = seconds_of(pool, name, given.steps, given.rounds)
            for process in busy:
                process.kill()
            bare = found.pop("bare")
            print(
                f"| {NAMES[name]} | {machine} | {bare:.1f} | "
                + " | ".join(f"{s / bare:.2f}" for s in found.values())
                + " |"
            )
            sys.stdout.flush()
    pool.close()
    print(describe_machine())


if __name__ == "__main__":
    main()
