"""Compares our TrainerMon with msprobe's on one configuration: the files, number by number, and the cost of a step.

    python benchmarks/cost/drop_in.py [--steps 21] [--rounds 3]

Costs are milliseconds of processor time a step, of the training process and of our recorder's process (with its start),
each measured in a process of its own; the median of the rounds. msprobe is installed into a separate virtual
environment (`benchmarks/peers.py`).
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
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


def train(subject: str, configuration: str, steps: int) -> tuple[float, float]:
    """Train the small GPT under a subject; return processor milliseconds a step: the training's, the recorder's."""
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
    monitor = None
    if subject != "bare":
        monitor = TrainerMon(configuration, params_have_main_grad=False)
        monitor.set_monitor(training.model, grad_acc_steps=1, optimizer=training.optimizer)
    training.step()
    begin = time.process_time()
    for _ in range(steps):
        training.step()
    own = time.process_time() - begin
    if subject == "ours" and monitor is not None:
        monitor.close()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * own / steps, 1e3 * (children.ru_utime + children.ru_stime) / steps


def run(subject: str, changes: dict[str, Any], steps: int, folder: Path) -> tuple[float, float]:
    """Train in a process of its own; return what `train` returns."""
    path = folder / "monitor_config.json"
    path.write_text(json.dumps({"targets": {}, "ops": OPS, "ndigits": 16, "format": "csv", **changes}))
    result = folder / "result.json"
    command = [peers_python(), __file__, "--worker", subject, str(path), str(steps), str(result)]
    environment = {**os.environ, "MONITOR_OUTPUT_DIR": str(folder / subject), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    own, recorder = json.loads(result.read_text())
    return own, recorder


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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=4)
    given = parser.parse_args()
    if given.worker:
        subject, configuration, steps, result = given.worker
        Path(result).write_text(json.dumps(train(subject, configuration, int(steps))))
        return
    print(
        "| configuration | bare | msprobe adds | ours adds | ours ÷ msprobe | our recorder |\n|---|---|---|---|---|---|"
    )
    for name, changes in CONFIGURATIONS.items():
        costs: dict[str, list[tuple[float, float]]] = {"bare": [], "msprobe": [], "ours": []}
        for _ in range(given.rounds):
            for subject, found in costs.items():
                with tempfile.TemporaryDirectory() as folder:
                    found.append(run(subject, changes, given.steps, Path(folder)))
        bare, theirs, ours = (statistics.median(own for own, _ in found) for found in costs.values())
        recorder = statistics.median(recorder for _, recorder in costs["ours"])
        added = f"{theirs - bare:.1f} | {ours - bare:.1f} | {(ours - bare) / (theirs - bare):.3f}"
        print(f"| {name} | {bare:.1f} | {added} | {recorder:.1f} |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for subject in ("msprobe", "ours"):
            run(subject, ON, 3, Path(folder))
        print("\n| file | numbers compared | largest relative difference |\n|---|---|---|")
        for prefix, (count, worst) in largest_difference(Path(folder)).items():
            print(f"| {prefix} | {count} | {worst:.1e} |")
    print(describe_machine(), file=sys.stderr)


if __name__ == "__main__":
    main()
