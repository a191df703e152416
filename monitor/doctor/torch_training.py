"""Checks on a small training: watching changes no bit, the numbers are true, and a broken weight is found."""

import tempfile
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from trainsentry.collectors.torch.device.device import Device
from trainsentry.monitor.demo.model import Gpt, GptConfig
from trainsentry.monitor.doctor import verdicts
from trainsentry.monitor.doctor.check import Check
from trainsentry.monitor.doctor.verdicts import AFTER, BIT, BROKEN_AT, STEPS, Trained
from trainsentry.monitor.train_monitor import TrainMonitor

SIZES: Final = GptConfig(layers=2, width=64, heads=2, context=32)
CULPRIT: Final = "blocks.1.up.weight"
TOLERANCE: Final = {True: 1e-9, False: 1e-4}
"""Relative error of a norm that counts as true, with and without float64."""


def training_checks(device: Device) -> Iterator[Check]:
    """Yield the checks of short runs: bare, watched, and watched with a broken weight."""
    with tempfile.TemporaryDirectory(prefix="trainsentry-doctor-") as folder:
        everything, default, quiet = verdicts.configurations(folder)
        bare, again = train(device), train(device)
        watched, usual = train(device, everything), train(device, default)
        broken = train(device, quiet, broken=True)
    yield verdicts.recorder(watched)
    yield verdicts.harm(bare, again, watched)
    yield verdicts.truth(watched, TOLERANCE[device.has_float64])
    yield verdicts.culprit(broken, CULPRIT)
    yield verdicts.cost(usual)


def train(device: Device, config: dict[str, Any] | None = None, *, broken: bool = False) -> Trained:
    """Train a small GPT on random text, watched if there is a configuration, with a flipped bit if `broken`."""
    torch.manual_seed(0)
    model = Gpt(SIZES).to(device.type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = None if config is None else TrainMonitor(config).watch(model, optimizer)
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
    trained.weights = [p.detach().cpu().numpy() for p in model.parameters()]
    if monitor is not None:
        verdicts.finish(monitor, trained)
    return trained


def _norms(model: nn.Module) -> dict[str, float]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.cpu().double().norm().item() for name, grad in grads.items()}


def _flip(parameter: nn.Parameter) -> None:
    """Flip a bit of the first element through the host: a device may not read its floats as whole numbers."""
    whole = parameter.detach().cpu()
    whole.view(-1).view(torch.int32)[0] ^= 1 << BIT
    with torch.no_grad():
        parameter.copy_(whole.to(parameter.device))
