"""Checks on a small training of MindSpore: watching changes no bit, the numbers are true, a broken weight is found."""

import tempfile
from collections.abc import Iterator
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from trainsentry.collectors.mindspore.runtime import on_host
from trainsentry.monitor.demo.mindspore_training import BATCH, CONTEXT, VOCABULARY, Gpt
from trainsentry.monitor.doctor import verdicts
from trainsentry.monitor.doctor.check import Check
from trainsentry.monitor.doctor.verdicts import AFTER, BIT, BROKEN_AT, STEPS, Trained
from trainsentry.monitor.train_monitor import TrainMonitor

CULPRIT: Final = "blocks.1.up.weight"
TOLERANCE: Final = {True: 1e-6, False: 1e-4}
"""Relative error of a norm that counts as true, read on the host, and on a device in float32."""


def training_checks() -> Iterator[Check]:
    """Yield the checks of short runs: bare, watched, and watched with a broken weight."""
    with tempfile.TemporaryDirectory(prefix="trainsentry-doctor-") as folder:
        everything, default, quiet = verdicts.configurations(folder)
        bare, again = train(), train()
        watched, usual = train(everything), train(default)
        broken = train(quiet, broken=True)
    yield verdicts.recorder(watched)
    yield verdicts.harm(bare, again, watched)
    yield verdicts.truth(watched, TOLERANCE[on_host()])
    yield verdicts.culprit(broken, CULPRIT)
    yield verdicts.cost(usual)


def train(config: dict[str, Any] | None = None, *, broken: bool = False) -> Trained:
    """Train a small GPT on random text, watched if there is a configuration, with a flipped bit if `broken`."""
    ms.set_seed(0)
    model = Gpt()
    model.set_train()
    optimizer = nn.AdamWeightDecay(model.trainable_params(), 1e-3)
    grad = ms.value_and_grad(_loss_of(model), None, optimizer.parameters)
    monitor = None if config is None else TrainMonitor(config).watch(model, optimizer)
    trained, numbers = Trained(), np.random.default_rng(1)
    for step in range(STEPS + AFTER * broken):
        rows = numbers.integers(0, VOCABULARY, (BATCH, CONTEXT + 1)).astype(np.int32)
        if broken and step == BROKEN_AT:
            _flip(dict(model.parameters_and_names())[CULPRIT])
        loss, gradients = grad(Tensor(rows[:, :-1]), Tensor(rows[:, 1:]))
        if monitor is not None:
            monitor.log(loss=loss)
        if step == STEPS - 1:
            trained.norms = _norms(optimizer.parameters, gradients)
        optimizer(gradients)
        if monitor is not None and broken and step >= BROKEN_AT:
            monitor.flush()  # such short steps would be over before the recorder has judged them
        trained.losses.append(float(loss.asnumpy()))
    trained.weights = [p.asnumpy().copy() for p in model.get_parameters()]
    if monitor is not None:
        verdicts.finish(monitor, trained)
    return trained


def _loss_of(model: Gpt) -> Any:
    loss_fn = nn.CrossEntropyLoss()

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(model(tokens).reshape((-1, VOCABULARY)), targets.reshape((-1,)))

    return forward


def _norms(parameters: Any, gradients: Any) -> dict[str, float]:
    pairs = zip(parameters, gradients, strict=True)
    return {p.name: float(np.linalg.norm(gradient.asnumpy().astype(np.float64))) for p, gradient in pairs}


def _flip(parameter: Parameter) -> None:
    """Flip a bit of the first element."""
    values = parameter.asnumpy().copy()
    values.reshape(-1).view(np.uint32)[0] ^= np.uint32(1 << BIT)
    parameter.set_data(Tensor(values))
