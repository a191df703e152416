"""Compares the cost of a dump with msprobe's: `python benchmarks/cost/debugger.py [--pairs N] [--flat]`.

Each figure comes from a separate process, after a bare one (msprobe patches torch for the whole process). The ratio of
a pair is median(dumped steps) / median(bare steps), without the first step, in which both build their caches. Both
subjects run in the virtual environment that `peers.py` makes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from gpt import PRESETS, Training
from machine import describe_machine
from peers import peers_python

MODES = [(task, level) for task in ("statistics", "tensor") for level in ("L0", "L1", "mix")]
STEPS = 4


def make_debugger(subject: str, folder: Path, task: str, level: str) -> Any:
    """Return a debugger with the defaults of both: it dumps every call except those that only move values."""
    config = {"task": task, "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": level}
    path = folder / "config.json"
    path.write_text(json.dumps({**config, task: {"scope": [], "list": [], "data_mode": ["all"]}}))
    if subject == "ours":
        from trainsentry import PrecisionDebugger
    else:
        from msprobe.pytorch import PrecisionDebugger
    return PrecisionDebugger(config_path=str(path))


def worker(subject: str, task: str, level: str) -> dict[str, Any]:
    """Train a few steps, dumped or bare; return the milliseconds of each, and tensors and bytes written per step."""
    torch.set_num_threads(1)
    training = Training(PRESETS["default"])
    training.step()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        debugger = None if subject == "bare" else make_debugger(subject, folder, task, level)
        times = []
        for _ in range(STEPS):
            began = time.perf_counter()
            if debugger is not None:
                debugger.start(model=training.model)
            training.step()
            if debugger is not None:
                debugger.stop()
                debugger.step()
            times.append(1e3 * (time.perf_counter() - began))
        files = [p for p in folder.rglob("*") if p.is_file()]
        tensors = sum(p.suffix == ".pt" for p in files) / STEPS
        size = sum({p.stat().st_ino: p.stat().st_size for p in files}.values()) / STEPS
    return {"ms": times[1:], "tensors": tensors, "bytes": size}


def flat(subject: str) -> dict[str, float]:
    """Return the microseconds of a call after a number of calls in one step."""
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        debugger = make_debugger(subject, Path(name), "statistics", "L1")
        x = torch.randn(64, 64)
        debugger.start()
        done = 0
        for calls in (500, 2000, 8000, 20000, 50000):
            began, first = time.perf_counter(), done
            while done < calls:
                x * 1.0001
                done += 1
            found[str(calls)] = 1e6 * (time.perf_counter() - began) / (done - first)
        debugger.stop()
        debugger.step()
    return found


def run(*arguments: str) -> Any:
    """Run this script in a separate process, in the peers' environment."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [peers_python(), __file__, "--worker", *arguments, "--result", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return json.load(file)


def compare(pairs: int, tasks: list[str]) -> None:
    """Print the table of costs."""
    print(
        "| task, level | msprobe: dumped / bare | ours: dumped / bare | added time, ours / msprobe | tensors a step |"
    )
    print("|---|---|---|---|---|")
    for task, level in (mode for mode in MODES if mode[0] in tasks):
        ratios: dict[str, list[float]] = {"msprobe": [], "ours": []}
        tensors = {}
        for _ in range(pairs):
            for subject, found in ratios.items():
                bare = run("bare", task, level)
                dumped = run(subject, task, level)
                found.append(statistics.median(dumped["ms"]) / statistics.median(bare["ms"]))
                tensors[subject] = dumped["tensors"]
        theirs, ours = (statistics.median(ratios[s]) for s in ("msprobe", "ours"))
        count = f"{tensors['msprobe']:.0f} / {tensors['ours']:.0f}" if task == "tensor" else ""
        share = (ours - 1) / (theirs - 1)
        print(f"| {task}, {level} | {theirs:.2f} | {ours:.2f} | {share:.2f} | {count} |", flush=True)


def main() -> None:
    """Run the chosen measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--task", action="append", choices=["statistics", "tensor"])
    parser.add_argument("--flat", action="store_true", help="cost a call in a step of 50,000")
    parser.add_argument("--worker", nargs="+")
    parser.add_argument("--result")
    given = parser.parse_args()
    if given.worker:
        result = flat(given.worker[1]) if given.worker[0] == "flat" else worker(*given.worker)
        Path(given.result).write_text(json.dumps(result))
        return
    if given.flat:
        for subject in ("msprobe", "ours"):
            costs = run("flat", subject)
            print(subject, ", ".join(f"{calls}: {cost:.0f} µs" for calls, cost in costs.items()), flush=True)
    else:
        compare(given.pairs, given.task or ["statistics", "tensor"])
    print(describe_machine(), file=sys.stderr)


if __name__ == "__main__":
    main()
