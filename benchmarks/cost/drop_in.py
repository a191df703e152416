"""Compares our TrainerMon with msprobe's on one configuration: the files, number by number, and the cost of a step.

    python benchmarks/cost/drop_in.py [--steps 21] [--pairs 3]

Each figure comes from a process of its own, after a bare one. The ratio of a pair is the mean step with the monitor
÷ the mean step of the bare run, without the first. msprobe is installed into a separate virtual environment
(`benchmarks/peers.py`).
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

from machine import describe_machine
from peers import peers_python

ON = dict.fromkeys(("wg_distribution", "mv_distribution", "param_distribution", "xy_distribution", "all_xy"), True)
OPS = ["norm", "min", "max", "mean", "nans"]
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "everything, every step": ON,
    "everything, every 10 steps": {**ON, "step_interval": 10},
    "gradients, every step": {"wg_distribution": True},
}


def train(subject: str, configuration: str, steps: int) -> list[float]:
    """Train the small GPT under a subject; return the seconds of each step."""
    import torch

    if subject == "msprobe":  # torch's newer modules have to be there before it looks for them
        import torch._dynamo
        import torch.distributed.tensor
        import torch.nn.utils._expanded_weights
        from msprobe.pytorch import TrainerMon
    else:
        from trainsentry.pytorch import TrainerMon
    from gpt import Preset, Training

    torch.set_num_threads(1)
    training = Training(Preset(6, 64, 2, 32, 2, 256, 1))
    if subject != "bare":
        monitor = TrainerMon(configuration, params_have_main_grad=False)
        monitor.set_monitor(training.model, grad_acc_steps=1, optimizer=training.optimizer)
    return [training.step() for _ in range(steps)]


def run(subject: str, changes: dict[str, Any], steps: int, folder: Path) -> list[float]:
    """Train in a process of its own; return the seconds of each step."""
    path = folder / "monitor_config.json"
    path.write_text(json.dumps({"targets": {}, "ops": OPS, "ndigits": 16, "format": "csv", **changes}))
    result = folder / "result.json"
    command = [peers_python(), __file__, "--worker", subject, str(path), str(steps), str(result)]
    environment = {**os.environ, "MONITOR_OUTPUT_DIR": str(folder / subject), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: list[float] = json.loads(result.read_text())
    return found


def largest_difference(folder: Path) -> dict[str, tuple[int, float]]:
    """Return, for each prefix, the numbers compared and the largest relative difference of rows that both wrote."""
    import pandas as pd

    [theirs], [ours] = ((folder / s).glob("*-rank0-*") for s in ("msprobe", "ours"))
    found: dict[str, tuple[int, float]] = {}
    for path in sorted(theirs.glob("*.csv")):
        other = ours / path.name
        if not other.exists():
            continue
        keys = [c for c in ("vpp_stage", "name", "step", "micro_step") if c in pd.read_csv(path, nrows=0)]
        both = pd.read_csv(path).merge(pd.read_csv(other), on=keys, suffixes=("", "_ours"))
        prefix = path.stem.rpartition("_")[0]
        count, worst = found.get(prefix, (0, 0.0))
        for op in OPS:
            pairs = both[[op, f"{op}_ours"]].astype(float).dropna()
            for a, b in pairs.itertuples(index=False):
                worst = max(worst, abs(a - b) / max(abs(a), abs(b), 1e-9))
            count += len(pairs)
        found[prefix] = (count, worst)
    return found


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--worker", nargs=4)
    given = parser.parse_args()
    if given.worker:
        subject, configuration, steps, result = given.worker
        Path(result).write_text(json.dumps(train(subject, configuration, int(steps))))
        return
    print(
        "| configuration | step, msprobe ÷ bare | step, ours ÷ bare | added time, ours ÷ msprobe |\n|---|---|---|---|"
    )
    for name, changes in CONFIGURATIONS.items():
        ratios: dict[str, list[float]] = {"msprobe": [], "ours": []}
        for _ in range(given.pairs):
            for subject, found in ratios.items():
                with tempfile.TemporaryDirectory() as folder:
                    bare = run("bare", changes, given.steps, Path(folder))
                    watched = run(subject, changes, given.steps, Path(folder))
                found.append(statistics.fmean(watched[1:]) / statistics.fmean(bare[1:]))
        theirs, ours = (statistics.median(ratios[s]) for s in ("msprobe", "ours"))
        share = (ours - 1) / (theirs - 1) if theirs > 1 else math.nan
        print(f"| {name} | {theirs:.2f} | {ours:.2f} | {share:.3f} |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for subject in ("msprobe", "ours"):
            run(subject, ON, 3, Path(folder))
        print("\n| file | numbers compared | largest relative difference |\n|---|---|---|")
        for prefix, (count, worst) in largest_difference(Path(folder)).items():
            print(f"| {prefix} | {count} | {worst:.1e} |")
    print(describe_machine(), file=sys.stderr)


if __name__ == "__main__":
    main()
