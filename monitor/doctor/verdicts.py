"""What short trainings have shown, and the checks that follow from it, whatever the framework."""

import contextlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.incident import Incident
from trainsentry.monitor.doctor.check import REPORT, Check
from trainsentry.monitor.train_monitor import TrainMonitor

STEPS: Final = 16
BROKEN_AT: Final = 12
AFTER: Final = 8
"""More steps of the run with a broken weight: a device is looked at a step late, and then every step is sampled."""

BIT: Final = 30
"""The bit that breaks a weight in float32: it multiplies a small one by 2^128."""

EVERYTHING: Final = {
    part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state", "updates", "activations")
}


@dataclass
class Trained:
    """What a training left: losses and weights on the host, gradient norms, what was found, and its seconds a step."""

    losses: list[float] = field(default_factory=list)
    weights: list[npt.NDArray[Any]] = field(default_factory=list)
    norms: dict[str, float] = field(default_factory=dict)
    recorded: dict[str, float] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    recorder: str = ""
    cost: float = 0.0


def configurations(folder: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the configurations of three watched runs: everything recorded, the default one, and a broken weight."""
    quiet: dict[str, Any] = {"strict": True, "export": {"report": False}}
    return (
        {"output_dir": f"{folder}/watched", "collect": EVERYTHING, **quiet},
        {"output_dir": f"{folder}/usual", **quiet},
        {"output_dir": f"{folder}/broken", "on_incident": {"dump": False}, **quiet},
    )


def finish(monitor: TrainMonitor, trained: Trained) -> None:
    """Close a run's monitor, and note what it has recorded and found."""
    monitor.flush()
    trained.incidents = monitor.incidents
    trained.recorded = {name: row["norm"] for name, row in monitor.metrics("gradient").items()}
    folder = Path(monitor.config.output_dir)
    with contextlib.redirect_stderr(io.StringIO()):  # its closing line
        monitor.close()
    status = json.loads((folder / "rank0" / "status.json").read_text(encoding="utf-8"))
    trained.recorder, trained.cost = status["recorder"]["mode"], status["cost"]["seconds_a_step"]


def recorder(watched: Trained) -> Check:
    """Return whether the recorder is a process of its own."""
    if watched.recorder == "process":
        return Check("recorder", "OK", "a process of its own")
    advice = "allow the training to start processes; until then the recorder shares the interpreter lock"
    return Check("recorder", "slow", f"a {watched.recorder} of the training process", advice)


def harm(bare: Trained, again: Trained, watched: Trained) -> Check:
    """Return whether a watched training is equal to two without us."""
    if not _same(bare, again):
        return Check("no harm", "OK", "not comparable: two runs without us differ on this device")
    if _same(bare, watched):
        return Check("no harm", "OK", f"losses and weights of {STEPS} steps are equal to the bit, watched or not")
    return Check("no harm", "wrong", "a watched training has other losses or weights", REPORT)


def _same(a: Trained, b: Trained) -> bool:
    return a.losses == b.losses and all(np.array_equal(x, y) for x, y in zip(a.weights, b.weights, strict=True))


def truth(watched: Trained, tolerance: float) -> Check:
    """Return whether the recorded norms of gradients are those of their values, but for a relative error."""
    if set(watched.recorded) != set(watched.norms):
        missing = len(set(watched.norms) - set(watched.recorded))
        return Check("truth", "wrong", f"{missing} of {len(watched.norms)} gradients have no row", REPORT)
    worst = max(abs(watched.recorded[n] - norm) / max(norm, 1e-30) for n, norm in watched.norms.items())
    found = f"the norms of {len(watched.norms)} gradients are off by {worst:.0e} at most"
    if worst <= tolerance:
        return Check("truth", "OK", found)
    return Check("truth", "wrong", found, REPORT)


def culprit(broken: Trained, parameter: str) -> Check:
    """Return whether a weight that was broken is the first suspect."""
    if not broken.incidents:
        return Check("culprit", "wrong", "a flipped bit in a weight was not reported", REPORT)
    suspect = broken.incidents[0].name
    if suspect == parameter:
        return Check("culprit", "OK", f"a flipped bit in {parameter} is the first suspect")
    return Check("culprit", "wrong", f"a flipped bit in {parameter} is blamed on {suspect}", REPORT)


def cost(usual: Trained) -> Check:
    """Return what the default configuration costs."""
    return Check("cost", "OK", f"{1e3 * usual.cost:.1f} ms of the host a step with the default configuration")
