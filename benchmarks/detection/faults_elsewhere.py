"""Plants faults in models outside the fault benchmark, and measures whether incidents name the culprit.

    python benchmarks/detection/faults_elsewhere.py [--seeds 0] [--tasks spirals,images] [--faults flip]
        [--collect default]

Trains the models of `clean_tasks.py` with AdamW or SGD, and harms the middle weight matrix or layer of each at a step
of 180 to 200. A tensor is the right first suspect when it belongs to the harmed layer; a fault in the whole optimizer
or batch has no layer, so only the suspect's quantity must be right.
"""

import argparse
import contextlib
import io
import itertools
import json
import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import clean_tasks
import torch
from clean_runs import COLLECT, train_step
from clean_tasks import TASKS, Task
from machine import describe_machine
from torch import Tensor, nn

import trainsentry

STEPS, ONSET = 240, 180
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=2e-2, momentum=0.9),
}
STATE = ("optimizer", "exp_avg", "exp_avg_sq", "momentum_buffer", "step")
CALLED = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding, nn.LSTM)


class Subject:
    """A training run, with its harmed layer and parameter."""

    def __init__(self, task: Task, optimizer: torch.optim.Optimizer, onset: int) -> None:
        self.task, self.optimizer, self.onset, self.step = task, optimizer, onset, 0
        named = [(n, p) for n, p in task.model.named_parameters() if p.requires_grad and p.ndim >= 2]
        self.name, self.parameter = named[len(named) // 2]
        inside = {id(m) for a in task.model.modules() if isinstance(a, nn.MultiheadAttention) for m in a.modules()}
        layers = [
            (n, m)
            for n, m in task.model.named_modules()
            if isinstance(m, CALLED) and id(m) not in inside and any(p.requires_grad for p in m.parameters())
        ]
        self.layer_name, self.layer = layers[len(layers) // 2]

    @property
    def at_onset(self) -> bool:
        """Whether this is the first step of the fault."""
        return self.step == self.onset

    @property
    def harmed(self) -> bool:
        """Whether the fault has set in."""
        return self.step >= self.onset


@dataclass(frozen=True)
class Fault:
    """A fault, and the right first suspect: its quantities, and whether it must belong to the harmed layer."""

    quantities: tuple[str, ...]
    of: str = ""
    before_step: Callable[[Subject], None] = lambda _: None
    before_update: Callable[[Subject], None] = lambda _: None
    output: Callable[[Subject, Tensor], Tensor] | None = None
    loss: Callable[[Subject, Tensor], Tensor] | None = None
    updates: bool = True


def _flip_weight(run: Subject) -> None:
    if run.at_onset:
        flat = run.parameter.detach().view(-1)
        exponent_is_small = flat.abs() < 2.0  # so that setting bit 30 makes it huge
        with torch.no_grad():
            flat.view(torch.int32)[int(exponent_is_small.nonzero()[0])] ^= 1 << 30


def _add_noise(run: Subject) -> None:
    if run.at_onset:
        with torch.no_grad():
            run.parameter += 2 * run.parameter.square().mean().sqrt() * torch.randn_like(run.parameter)


def _turn_round(run: Subject) -> None:
    if run.at_onset:
        with torch.no_grad():
            run.parameter.neg_()


def _vanish(run: Subject) -> None:
    if run.at_onset:
        with torch.no_grad():
            run.parameter.mul_(1e-3)


def _plant_nan(run: Subject) -> None:
    if run.at_onset and run.parameter.grad is not None:
        run.parameter.grad[(0,) * run.parameter.ndim] = float("nan")


def _zero_gradient(run: Subject) -> None:
    if run.harmed and run.parameter.grad is not None:
        run.parameter.grad.zero_()


def _large_gradient(run: Subject) -> None:
    if run.at_onset and run.parameter.grad is not None:
        run.parameter.grad.mul_(100)


def _freeze(run: Subject) -> None:
    if run.at_onset:
        run.layer.requires_grad_(requires_grad=False)


def _lose_state(run: Subject) -> None:
    if run.at_onset:
        run.optimizer.state.clear()


def _flip_state(run: Subject) -> None:
    state = run.optimizer.state[run.parameter]
    if run.at_onset and state:
        moment = state["exp_avg"] if "exp_avg" in state else state["momentum_buffer"]
        with torch.no_grad():
            moment[(0,) * moment.ndim] = 1e4 * moment.abs().max() + 1.0


def _raise_rate(run: Subject) -> None:
    if run.at_onset:
        for group in run.optimizer.param_groups:
            group["lr"] *= 30


def _nan_of(run: Subject, output: Tensor) -> Tensor:
    output = output.clone()
    if run.at_onset:
        output[(0,) * output.ndim] = float("nan")
    return output


FAULTS: dict[str, Fault] = {
    "flip": Fault(("parameter",), "parameter", before_step=_flip_weight),
    "noise": Fault(("parameter", "update"), "parameter", before_step=_add_noise),
    "sign": Fault(("parameter", "activation_output"), "parameter", before_step=_turn_round),
    "vanish": Fault(("parameter",), "parameter", before_step=_vanish),
    "nan_gradient": Fault(("gradient",), "parameter", before_update=_plant_nan),
    "zero_gradient": Fault(("gradient", "update"), "parameter", before_update=_zero_gradient),
    "large_gradient": Fault(("gradient",), "parameter", before_update=_large_gradient),
    "freeze": Fault(("update", "gradient"), "layer", before_step=_freeze),
    "lost_state": Fault(STATE, before_step=_lose_state),
    "flip_state": Fault(STATE, "parameter", before_step=_flip_state),
    "rate": Fault(("update", "optimizer", "learning_rate", "optimizer_learning_rate"), before_step=_raise_rate),
    "no_update": Fault(("update", "optimizer"), updates=False),
    "nan_output": Fault(("activation_output",), "layer", output=_nan_of),
    "large_output": Fault(("activation_output",), "layer", output=lambda run, out: out * 20.0 if run.at_onset else out),
    "dead": Fault(("activation_output",), "layer", output=lambda run, out: out * 1e-4 if run.harmed else out),
    "loss": Fault(
        ("loss", "gradient", "training", "data"), loss=lambda run, loss: loss * 1000.0 if run.at_onset else loss
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The incidents of one run; `delay` is in steps, None where nothing was found."""

    who: tuple[str, ...]
    delay: int | None
    first: bool
    within_three: bool
    incidents: int
    early: int
    said: str


def _train(task: Task, fault: Fault, run: Subject, config: dict[str, Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100, enabled=task.dtype is torch.float16)
    run.optimizer.register_step_pre_hook(lambda *_: fault.before_update(run))
    if not fault.updates:
        _undo_updates(run)
    if fault.output is not None:
        change = fault.output

        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            changed = change(run, first)
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        run.layer.register_forward_hook(hook)
    whole_loss = task.loss
    if fault.loss is not None:
        weigh = fault.loss
        task = Task(task.model, lambda: weigh(run, whole_loss()), task.dtype, task.micro_steps, task.clip, task.after)
    refuses_nan = contextlib.suppress(ValueError)  # a distribution does; the run ends there, as a user's would
    with trainsentry.TrainMonitor(config).watch(task.model, run.optimizer) as monitor, refuses_nan:
        for step in range(STEPS):
            run.step = step
            fault.before_step(run)
            monitor.log(loss=train_step(task, run.optimizer, scaler))


def _undo_updates(run: Subject) -> None:
    """Undo every update immediately."""
    kept: list[Tensor] = []
    weights = list(run.task.model.parameters())

    def keep(*_: Any) -> None:
        kept[:] = [p.detach().clone() for p in weights] if run.harmed else []

    def restore(*_: Any) -> None:
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=False):
                weight.copy_(before)

    run.optimizer.register_step_pre_hook(keep)
    run.optimizer.register_step_post_hook(restore)


def _is_right(suspect: dict[str, Any], fault: Fault, run: Subject) -> bool:
    if suspect["quantity"] not in fault.quantities:
        return False
    owner = run.name.rpartition(".")[0] if fault.of == "parameter" else run.layer_name
    return not fault.of or suspect["name"] == owner or str(suspect["name"]).startswith(owner + ".")


def trial(who: tuple[str, str, str, str, int]) -> Outcome:
    """Train and harm one model; return the outcome."""
    name, optimizer_name, collect, fault_name, seed = who
    logging.getLogger("trainsentry").setLevel(logging.CRITICAL + 1)
    os.environ["TRAINSENTRY_REPORT"] = "0"
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task, fault = getattr(clean_tasks, name)(), FAULTS[fault_name]
    run = Subject(task, OPTIMIZERS[optimizer_name](task.model), ONSET + seed % 7 + len(name + fault_name) % 14)
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
        config = {"output_dir": directory, "collect": COLLECT[collect], "on_incident": {"dump": False}}
        _train(task, fault, run, config)
        incidents = list({line["id"]: line for line in _lines(Path(directory) / "incidents.jsonl")}.values())
        alarms = [a["step"] for a in _lines(Path(directory) / "rank0" / "anomalies.jsonl") if a.get("alarm", True)]
    early = [i for i in incidents if i["last_seen"] < run.onset]
    after = [i for i in incidents if i["last_seen"] >= run.onset]
    late = [step for step in alarms if step >= run.onset]
    tag = tuple(str(x) for x in who)
    if not after or not late:
        said = f"harmed {run.name if fault.of != 'layer' else run.layer_name} at {run.onset}: nothing"
        return Outcome(tag, None, first=False, within_three=False, incidents=0, early=len(early), said=said)
    suspects = after[0]["suspects"]
    right = [_is_right(s, fault, run) for s in suspects]
    shown = [(s["name"], s["quantity"], s["kind"], s["step"]) for s in suspects[:3]]
    harmed = run.name if fault.of != "layer" else run.layer_name
    said = f"harmed {harmed} at {run.onset}: {after[0]['summary']} || {shown}"
    return Outcome(tag, min(late) - run.onset, right[0], any(right[:3]), len(after), len(early), said)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def main() -> None:
    """Run every combination and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--tasks", default=",".join(t.__name__ for t in TASKS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--collect", default="everything")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    lists = [options.tasks.split(","), options.optimizers.split(","), [options.collect], options.faults.split(",")]
    trials = list(itertools.product(*lists, range(int(first), int(last or first) + 1)))
    print(f"{describe_machine()}\n")
    outcomes: list[Outcome] = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for outcome in pool.imap_unordered(trial, trials):
            outcomes.append(outcome)
            if not outcome.first or outcome.early or outcome.incidents > 1:
                print(*outcome.who, outcome.delay, outcome.incidents, outcome.early, outcome.said, flush=True)
    print("\n| fault | runs | found | first suspect right, of those | within three | incidents | early |")
    print("|---|---|---|---|---|---|---|")
    for fault in [*options.faults.split(","), "all"]:
        runs = [o for o in outcomes if fault in {"all", o.who[3]}]
        found = [o for o in runs if o.delay is not None]
        row = [len(runs), len(found), sum(o.first for o in found), sum(o.within_three for o in found),
               sum(o.incidents for o in found), sum(o.early for o in runs)]  # fmt: skip
        print(f"| {fault} | " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
