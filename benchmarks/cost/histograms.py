"""Compares what histograms of all gradients and weights cost: ours, `wandb.watch` and `SummaryWriter.add_histogram`.

    python benchmarks/cost/histograms.py [--steps 12] [--rounds 3]

Each trains a GPT (6 layers of width 256, 5 million parameters) in a process of its own, with histograms of every
gradient and every weight at every step. Costs are milliseconds of processor time that a step takes more than without:
in the training process, and in the others that it started; and the bytes that were written a step. wandb writes to disk
only (`WANDB_MODE=offline`). The packages are installed into a separate environment (`benchmarks/peers.py`).
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

from machine import describe_machine
from peers import peers_python

SUBJECTS = ("bare", "ours, without histograms", "ours", "ours, TensorBoard", "SummaryWriter", "wandb")
NUMBERS = ["min", "max", "mean", "norm", "nans", "infs", "zeros"]


def attached(subject: str, training: Any, folder: str) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Attach a monitor; return what a step calls before the update of the weights is forgotten, and the end."""
    if subject.startswith("ours"):
        import trainsentry

        parts = {"every": 1}
        off = dict.fromkeys(("optimizer_state", "updates", "activations", "communication"), False)
        monitor = trainsentry.TrainMonitor(
            {
                "output_dir": folder,
                "statistics": [*NUMBERS, "histogram"] if "without" not in subject else NUMBERS,
                "collect": {"gradients": parts, "parameters": parts, **off},
                "export": {"csv": "TensorBoard" not in subject, "tensorboard": "TensorBoard" in subject},
            }
        )
        monitor.watch(training.model, training.optimizer)
        return lambda _: None, monitor.close
    if subject == "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(folder)

        def add(step: int) -> None:
            for name, p in training.model.named_parameters():
                writer.add_histogram(name, p, step)
                writer.add_histogram(f"{name}.grad", p.grad, step)

        return add, writer.close
    if subject == "wandb":
        import wandb

        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
        run.watch(training.model, log="all", log_freq=1)
        return lambda step: run.log({"step": step}), run.finish
    return lambda _: None, lambda: None


def train(subject: str, folder: str, steps: int) -> tuple[float, float]:
    """Train under a subject; return processor milliseconds a step: of this process, and of those that it started."""
    import torch
    from gpt import PRESETS, Training
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(1)
    training = Training(PRESETS["default"])
    each, end = attached(subject, training, folder)
    for step in range(steps + 2):
        if step == 2:  # the first steps compile and allocate
            begin = time.process_time()
        inputs, targets = training.data.batch()
        F.cross_entropy(training.model(inputs).flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()
        each(step)
        training.optimizer.zero_grad(set_to_none=True)
    own = time.process_time() - begin
    end()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * own / steps, 1e3 * (children.ru_utime + children.ru_stime) / (steps + 2)


def run(subject: str, steps: int) -> tuple[float, float, float]:
    """Train in a process of its own; return what `train` returns, and the kilobytes written a step."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        out = Path(folder) / "out"
        out.mkdir()
        command = [peers_python(), __file__, "--worker", subject, str(out), str(steps), str(result)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file() and not path.is_symlink())
        own, others = json.loads(result.read_text())
    return own, others, size / 1024 / (steps + 2)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=4)
    given = parser.parse_args()
    if given.worker:
        subject, folder, steps, result = given.worker
        Path(result).write_text(json.dumps(train(subject, folder, int(steps))))
        return
    found: dict[str, list[tuple[float, float, float]]] = {subject: [] for subject in SUBJECTS}
    for _ in range(given.rounds):
        for subject, costs in found.items():
            costs.append(run(subject, given.steps))
    bare = statistics.median(own for own, _, _ in found["bare"])
    print("| | training process, ms a step more | other processes, ms a step | kB a step |\n|---|---|---|---|")
    print(f"| bare step | {bare:.0f} in all | | |")
    for subject in SUBJECTS[1:]:
        own, others, size = (statistics.median(column) for column in zip(*found[subject], strict=True))
        print(f"| {subject} | {own - bare:.1f} | {others:.1f} | {size:.0f} |", flush=True)
    print(describe_machine(), file=sys.stderr)


if __name__ == "__main__":
    main()
