"""Checks on a small training: watching changes no bit, the numbers are true, and a broken weight is found."""

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainsentry.anomaly.incident import Incident
from trainsentry.collectors.torch.device.device import Device
from trainsentry.monitor.demo.model import Gpt, GptConfig
from trainsentry.monitor.doctor.check import REPORT, Check
from trainsentry.monitor.train_monitor import TrainMonitor

SIZES: Final = GptConfig(layers=2, width=64, heads=2, context=32)
STEPS: Final = 16
BROKEN_AT: Final = 12
AFTER: Final = 8
"""More steps of the run with a broken weight: a device is looked at a step late, and then every step is sampled."""

CULPRIT: Final = "blocks.1.up.weight"
BIT: Final = 30
TOLERANCE: Final = {True: 1e-9, False: 1e-4}
"""Relative error of a norm that counts as true, with and without float64."""

EVERYTHING: Final = {
    part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state", "updates", "activations")
}


@dataclass
class Trained:
    """What a training left: losses and weights on the host, gradient norms, what was found, and its seconds a step."""

    losses: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    norms: dict[str, float] = field(default_factory=dict)
    recorded: dict[str, float] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    recorder: str = ""
    cost: float = 0.0


def training_checks(device: Device) -> Iterator[Check]:
    """Yield the checks of three short runs: bare, watched, and watched with a broken weight."""
    with tempfile.TemporaryDirectory(prefix="trainsentry-doctor-") as folder:
        bare, again = train(device), train(device)
        watched = train(device, {"output_dir": f"{folder}/watched", "collect": EVERYTHING, "export": {"report": False}})
        usual = train(device, {"output_dir": f"{folder}/usual", "export": {"report": False}})
        broken = train(
            device, {"output_dir": f"{folder}/broken", "on_incident": {"dump": False}, "export": {"report": False}},
            broken=True,
        )  # fmt: skip
    yield _recorder(watched)
    yield _harm(bare, again, watched)
    yield _truth(device, watched)
    yield _culprit(broken)
    yield Check("cost", "OK", f"{1e3 * usual.cost:.1f} ms of the host a step with the default configuration")


def train(device: Device, config: dict[str, Any] | None = None, *, broken: bool = False) -> Trained:
    """Train a small GPT on random text, watched if there is a configuration, with a flipped bit if `broken`."""
    torch.manual_seed(0)
    model = Gpt(SIZES).to(device.type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = None if config is None else TrainMonitor({**config, "strict": True}).watch(model, optimizer)
    trained, losses = Trained(), []
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS + AFTER * broken):
        tokens = torch.randint(0, SIZES.vocabulary, (4, SIZES.context + 1), generator=generator).to(device.type)
        if broken and step == BROKEN_AT:
            _flip(dict(model.named_parameters())[CULPRIT])
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if monitor is not None:
            monitor.log(loss=loss.detach())
        if step == STEPS - 1:
            trained.norms = _norms(model)
        optimizer.step()
        if monitor is not None and broken and step >= BROKEN_AT:
            monitor.flush()  # such short steps would be over before the recorder has judged them
        losses.append(loss.detach())
    trained.losses = [float(x) for x in losses]
    trained.weights = [p.detach().cpu() for p in model.parameters()]
    if monitor is not None:
        _finish(monitor, trained)
    return trained


def _finish(monitor: TrainMonitor, trained: Trained) -> None:
    monitor.flush()
    trained.incidents = monitor.incidents
    trained.recorded = {name: row["norm"] for name, row in monitor.metrics("gradient").items()}
    folder = Path(monitor.config.output_dir)
    with contextlib.redirect_stderr(io.StringIO()):  # its closing line
        monitor.close()
    status = json.loads((folder / "rank0" / "status.json").read_text(encoding="utf-8"))
    trained.recorder, trained.cost = status["recorder"]["mode"], status["cost"]["seconds_a_step"]


def _norms(model: nn.Module) -> dict[str, float]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.cpu().double().norm().item() for name, grad in grads.items()}


def _flip(parameter: nn.Parameter) -> None:
    """Flip a bit of the first element through the host: a device may not read its floats as whole numbers."""
    whole = parameter.detach().cpu()
    whole.view(-1).view(torch.int32)[0] ^= 1 << BIT
    with torch.no_grad():
        parameter.copy_(whole.to(parameter.device))


def _recorder(watched: Trained) -> Check:
    if watched.recorder == "process":
        return Check("recorder", "OK", "a process of its own")
    advice = "allow the training to start processes; until then the recorder shares the interpreter lock"
    return Check("recorder", "slow", f"a {watched.recorder} of the training process", advice)


def _harm(bare: Trained, again: Trained, watched: Trained) -> Check:
    if not _same(bare, again):
        return Check("no harm", "OK", "not comparable: two runs without us differ on this device")
    if _same(bare, watched):
        return Check("no harm", "OK", f"losses and weights of {STEPS} steps are equal to the bit, watched or not")
    return Check("no harm", "wrong", "a watched training has other losses or weights", REPORT)


def _same(a: Trained, b: Trained) -> bool:
    return a.losses == b.losses and all(torch.equal(x, y) for x, y in zip(a.weights, b.weights, strict=True))


def _truth(device: Device, watched: Trained) -> Check:
    if set(watched.recorded) != set(watched.norms):
        missing = len(set(watched.norms) - set(watched.recorded))
        return Check("truth", "wrong", f"{missing} of {len(watched.norms)} gradients have no row", REPORT)
    worst = max(abs(watched.recorded[n] - norm) / max(norm, 1e-30) for n, norm in watched.norms.items())
    found = f"the norms of {len(watched.norms)} gradients are off by {worst:.0e} at most"
    if worst <= TOLERANCE[device.has_float64]:
        return Check("truth", "OK", found)
    return Check("truth", "wrong", found, REPORT)


def _culprit(broken: Trained) -> Check:
    if not broken.incidents:
        return Check("culprit", "wrong", "a flipped bit in a weight was not reported", REPORT)
    suspect = broken.incidents[0].name
    if suspect == CULPRIT:
        return Check("culprit", "OK", f"a flipped bit in {CULPRIT} is the first suspect")
    return Check("culprit", "wrong", f"a flipped bit in {CULPRIT} is blamed on {suspect}", REPORT)
