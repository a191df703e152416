"""Compares the monitor's cost on a CPU with that of msprobe's two generations.

    python benchmarks/cost/overhead.py [--subject none,trainsentry,trainsentry7,msprobe_v1,msprobe_v2]
        [--preset default,many_small] [--workload gradients,…] [--rounds 8] [--steps 3] [--only time|count]

Subjects: `trainsentry` computes and writes the five statistics of the peers, `trainsentry7` all seven; both with
detection on. msprobe is installed from PyPI into a separate virtual environment, `.venv-peers`, in this project.

Times: for each workload all subjects train in one process, in alternating blocks of steps whose order rotates with the
rounds. The ratio of a round is a subject's mean step ÷ the bare mean step of that round; printed are the median,
minimum and maximum over the rounds, and the median of the milliseconds added. `quick` compares the tenth percentile of
all steps instead, which noise affects least. Rounds whose bare block took more than 1.5 times the quickest one
(another process used a core) are left out and counted. CPU time is that of all processes, until everything is written.
Counts: each subject trains in a separate process; its step's counts minus the bare step's. `calls` are Python and C
calls, `read` the bytes that operations and kernels touch, `memory` the peak resident memory of all processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from peers import ROOT, peers_python
from subjects import WORKLOADS

NOISY = 1.5
"""A bare block that takes this many times the quickest one was disturbed by another process."""

COUNTS = ("operations", "host_reads", "calls", "bytes_read", "bytes_written", "peak_mb")


def run_worker(asked: dict[str, Any]) -> Any:
    """Run the worker in the peers' environment; return its last line, decoded."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT / "benchmarks")}
    command = [peers_python(), ROOT / "benchmarks" / "cost" / "overhead_worker.py", json.dumps(asked)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{asked}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


Block = tuple[list[float], float]


def kept_rounds(bare: list[Block]) -> list[int]:
    """Return the rounds in which no other process disturbed the bare training."""
    walls = [statistics.fmean(steps) for steps, _ in bare]
    return [i for i, wall in enumerate(walls) if wall <= NOISY * min(walls)]


def quick_step(blocks: list[Block], rounds: list[int]) -> float:
    """Return the tenth percentile of the steps, in seconds."""
    steps = sorted(wall for i in rounds for wall in blocks[i][0])
    return steps[len(steps) // 10]


def summarise(blocks: dict[str, list[Block]]) -> dict[str, dict[str, float]]:
    """Return each subject's ratio to the bare step and added time, by rounds and by quick steps."""
    bare = blocks["none"]
    rounds = kept_rounds(bare)
    mean = {name: [statistics.fmean(steps) for steps, _ in of_subject] for name, of_subject in blocks.items()}
    summary = {}
    for name, of_subject in blocks.items():
        ratios = [mean[name][i] / mean["none"][i] for i in rounds]
        quick = quick_step(of_subject, rounds) - quick_step(bare, rounds)
        summary[name] = {
            "step_ms": 1e3 * statistics.median(mean[name][i] for i in rounds),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "greatest": max(ratios),
            "added_ms": 1e3 * statistics.median(mean[name][i] - mean["none"][i] for i in rounds),
            "quick_ratio": 1 + quick / quick_step(bare, rounds),
            "quick_added_ms": 1e3 * quick,
            "added_cpu_ms": 1e3 * statistics.median(of_subject[i][1] - bare[i][1] for i in rounds),
            "rounds": len(rounds),
        }
    return summary


def measure_times(preset: str, workloads: list[str], subjects: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Measure each workload; print each subject's table row."""
    print(f"\n### {preset}: time\n", flush=True)
    print(
        "| workload | subject | step (ms) | ÷ bare | added (ms) | quick ÷ bare | added (ms) | CPU added (ms) | rounds |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    results = {}
    for workload in workloads:
        peers = [s for s in subjects if workload in WORKLOADS or not s.startswith("msprobe")]
        asked = {"mode": "time", "subjects": peers, "preset": preset, "workload": workload}
        measured = run_worker({**asked, "rounds": rounds, "steps": steps})
        results[workload] = summarise(measured["blocks"])
        for name, s in results[workload].items():
            ratio = f"{s['ratio']:.3f} ({s['least']:.3f}–{s['greatest']:.3f})"
            quick = f"{s['quick_ratio']:.3f} | {s['quick_added_ms']:.2f}"
            row = f"{s['step_ms']:.1f} | {ratio} | {s['added_ms']:.2f} | {quick}"
            print(f"| {workload} | {name} | {row} | {s['added_cpu_ms']:.1f} | {s['rounds']:.0f} |", flush=True)
    print(f"\n{measured['machine']}")
    return results


def print_shares(preset: str, results: dict[str, Any]) -> None:
    """Print the time that each trainsentry subject adds as a share of the time that each peer adds."""
    print(f"\n### {preset}: time added by ours ÷ time added by msprobe: by rounds, by quick steps (aim)\n")
    print("| workload | " + " | ".join(f"{ours} ÷ {peer}" for ours in OURS for peer in PEERS_BOUND) + " |")
    print("|---|" + "---|" * (len(OURS) * len(PEERS_BOUND)))
    for workload, of_workload in results.items():
        cells = []
        for ours in OURS:
            for peer, bound in PEERS_BOUND.items():
                if ours in of_workload and peer in of_workload:
                    by_rounds, by_quick = (
                        of_workload[ours][added] / of_workload[peer][added] for added in ("added_ms", "quick_added_ms")
                    )
                    cells.append(f"{by_rounds:.3f}, {by_quick:.3f} (≤ {bound:g})")
        if cells:
            print(f"| {workload} | " + " | ".join(cells) + " |")


OURS = ("trainsentry", "trainsentry7")
PEERS_BOUND = {"msprobe_v1": 0.1, "msprobe_v2": 0.25}


def measure_counts(preset: str, workloads: list[str], subjects: list[str]) -> dict[str, Any]:
    """Print the counts of each subject's step minus those of a bare step."""
    print(f"\n### {preset}: counts of a step, beyond the bare one's\n", flush=True)
    columns = ["workload", "subject", "operations", "host reads", "calls", "read (MB)", "written (kB)", "memory (MB)"]
    print("| " + " | ".join([*columns, "same result"]) + " |")
    print("|---|---|---|---|---|---|---|---|---|")
    bare = run_worker({"mode": "count", "subject": "none", "preset": preset, "workload": "all"})
    results = {"bare": {name: bare[name] for name in COUNTS}}
    for workload in workloads:
        for subject in subjects:
            if workload not in WORKLOADS and subject.startswith("msprobe"):
                continue
            told = run_worker({"mode": "count", "subject": subject, "preset": preset, "workload": workload})
            extra = {name: told[name] - bare[name] for name in COUNTS}
            same = told["losses"] == bare["losses"] and told["weights"] == bare["weights"]
            results[f"{workload}: {subject}"] = {**extra, "same": same}
            counts = f"{extra['operations']:,} | {extra['host_reads']:,} | {extra['calls']:,}"
            volumes = f"{extra['bytes_read'] / 1e6:.1f} | {extra['bytes_written'] / 1e3:.0f} | {extra['peak_mb']:.0f}"
            print(f"| {workload} | {subject} | {counts} | {volumes} | {'yes' if same else 'NO'} |", flush=True)
    return results


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", default="none,trainsentry,trainsentry7,msprobe_v1,msprobe_v2")
    parser.add_argument("--preset", default="default,many_small")
    parser.add_argument("--workload", default=",".join([*WORKLOADS, "default configuration"]))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="steps of a block; 10 for the default configuration")
    parser.add_argument("--only", choices=["time", "count"])
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    subjects = [s for s in options.subject.split(",") if s != "none"]
    workloads = options.workload.split(",")
    figures: dict[str, Any] = {}
    for preset in options.preset.split(","):
        of_preset = figures[preset] = {}
        if options.only != "count":
            of_preset["time"] = measure_times(preset, workloads, subjects, options.rounds, options.steps)
            print_shares(preset, of_preset["time"])
        if options.only != "time":
            of_preset["count"] = measure_counts(preset, workloads, subjects)
        if options.out is not None:
            options.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
