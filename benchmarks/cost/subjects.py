"""The monitors to compare, each with the methods `step`, `settle` and `close`.

A subject is made with (model, optimizer, directory, workload, statistics). `step` is called after each update, `settle`
at the end of a block of steps: a monitor finishes its deferred work then, not in another subject's block.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

PEERS_FIVE = ["min", "max", "mean", "norm", "nans"]
ALL_SEVEN = [*PEERS_FIVE, "infs", "zeros"]
WORKLOADS = {
    "gradients": {"gradients"},
    "optimizer state": {"optimizer_state"},
    "weights": {"parameters"},
    "activations": {"activations"},
    "all": {"gradients", "optimizer_state", "parameters", "activations"},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "default configuration": {},
    "default with same_step": {"on_incident": {"dump": {"same_step": True}}},
}
OUR_PARTS = ("gradients", "optimizer_state", "parameters", "updates", "activations", "communication")


class Subject(Protocol):
    """A monitor that watches a model."""

    def step(self) -> None:
        """Process an update."""

    def settle(self) -> None:
        """Finish all deferred work."""

    def close(self) -> None:
        """Stop watching."""


class Trainsentry:
    """This project, with detection on; the optimizer's calls mark the ends of steps."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, directory: Path, config: dict[str, Any]) -> None:
        import trainsentry

        self.monitor = trainsentry.TrainMonitor({"output_dir": str(directory), **config}).watch(model, optimizer)

    def step(self) -> None:
        """Do nothing: the optimizer's hook has already called the monitor."""

    def settle(self) -> None:
        """Wait until the recorder has written everything."""
        self.monitor.flush()

    def close(self) -> None:
        """Close the monitor."""
        self.monitor.close()


def trainsentry(model: nn.Module, optimizer: Optimizer, directory: Path, workload: str, ops: list[str]) -> Subject:
    """Watch with trainsentry: the workload's parts at every step, or a default configuration."""
    if workload in DEFAULTS:
        return Trainsentry(model, optimizer, directory, DEFAULTS[workload])
    collect = {part: {"every": 1} if part in WORKLOADS[workload] else False for part in OUR_PARTS}
    return Trainsentry(model, optimizer, directory, {"statistics": ops, "collect": collect})


class MsprobeV1:
    """msprobe's TrainerMon; it patches `optimizer.step`."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, directory: Path, parts: set[str], ops: list[str]
    ) -> None:
        from msprobe.pytorch import TrainerMon
        from torch.utils.hooks import BackwardHook

        # It wraps these again for every monitor and never restores them, which would slow the other subjects.
        self.patched = BackwardHook, BackwardHook.setup_input_hook, BackwardHook.setup_output_hook
        os.environ["MONITOR_OUTPUT_DIR"] = str(directory)
        config = {
            "targets": {},
            "format": "csv",
            "ops": ops,
            "ndigits": 16,
            "wg_distribution": "gradients" in parts,
            "mv_distribution": "optimizer_state" in parts,
            "param_distribution": "parameters" in parts,
            "xy_distribution": "activations" in parts,
            "all_xy": "activations" in parts,
        }
        path = directory / "config.json"
        path.write_text(json.dumps(config))
        self.optimizer, self.original = optimizer, optimizer.step
        self.monitor = TrainerMon(str(path), params_have_main_grad=False)
        self.monitor.set_monitor(model, optimizer=optimizer, grad_acc_steps=1)

    def step(self) -> None:
        """Do nothing: the patched optimizer has already called the monitor."""

    def settle(self) -> None:
        """Do nothing: it writes at once."""

    def close(self) -> None:
        """Remove its hooks and patches."""
        self.monitor._remove_all_hooks(self.optimizer)
        self.optimizer.step = self.original  # type: ignore[method-assign]
        hook, self_input, self_output = self.patched
        hook.setup_input_hook, hook.setup_output_hook = self_input, self_output


class MsprobeV2:
    """msprobe's second generation."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, directory: Path, parts: set[str], ops: list[str]
    ) -> None:
        from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

        on = {"enabled": True, "ops": ops}
        monitors = {
            "gradients": ("weight_grad", {**on, "monitor_mbs_grad": False}),
            "optimizer_state": ("optimizer", {**on, "mv_distribution": True}),
            "parameters": ("param", {**on, "param_distribution": True}),
            "activations": ("module", {**on, "targets": []}),
        }
        config = {
            "framework": "pytorch",
            "output_dir": str(directory),
            "rank": [0],
            "start_step": 0,
            "step_interval": 1,
            "step_count_per_record": 1,
            "format": "csv",
            "patch_optimizer_step": False,
            "monitors": dict(monitors[part] for part in sorted(parts)),
        }
        path = directory / "config.json"
        path.write_text(json.dumps(config))
        self.monitor = TrainerMonitorV2(str(path), fr="pytorch")
        self.monitor.start(model=model, optimizer=optimizer, grad_acc_steps=1)

    def step(self) -> None:
        """Mark the end of a step."""
        self.monitor.step()

    def settle(self) -> None:
        """Do nothing: it writes at once."""

    def close(self) -> None:
        """Stop it."""
        self.monitor.stop()


def _msprobe(kind: Callable[..., Subject]) -> Callable[..., Subject]:
    return lambda model, optimizer, directory, workload, ops: kind(
        model, optimizer, directory, WORKLOADS[workload], ops
    )


SUBJECTS: dict[str, Callable[..., Subject]] = {
    "trainsentry": trainsentry,
    "msprobe_v1": _msprobe(MsprobeV1),
    "msprobe_v2": _msprobe(MsprobeV2),
}


def make_subject(name: str, model: nn.Module, optimizer: Optimizer, directory: Path, workload: str) -> Subject | None:
    """Return the named subject for a model; `none` watches nothing, `trainsentry7` computes all seven statistics."""
    if name == "none":
        return None
    directory.mkdir(parents=True, exist_ok=True)
    ops = ALL_SEVEN if name == "trainsentry7" else PEERS_FIVE
    return SUBJECTS[name.rstrip("7")](model, optimizer, directory, workload, ops)
