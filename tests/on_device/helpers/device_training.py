"""Trainings of a small GPT on the device under test, bare and watched."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from the_device import DEVICE, synchronize

import trainsentry
from trainsentry.monitor.demo.model import Gpt, GptConfig

SIZES = GptConfig(layers=2, width=64, heads=2, context=32)
PARTS = ("gradients", "parameters", "optimizer_state", "updates", "activations", "communication")
EVERYTHING = {part: {"every": 1} for part in PARTS}
STEPS = 30


@dataclass(frozen=True)
class Ran:
    """What a training left: losses, weights, state, random numbers, incidents, the stop, rows of the last step."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    state: list[torch.Tensor]
    drawn: tuple[float, float]
    incidents: tuple[Any, ...]
    stopped: trainsentry.TrainingStopped | None
    records: Any


def new_model(seed=0):
    """Return a GPT on the device, the same for the same seed on every device."""
    torch.manual_seed(seed)
    return Gpt(SIZES).to(DEVICE)


def batch(step, size=4):
    """Return inputs and targets of a step, on the device; half of the bytes repeat the one before."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SIZES.vocabulary, (size, SIZES.context + 1), generator=generator) // 8
    return tokens[:, :-1].to(DEVICE), tokens[:, 1:].to(DEVICE)


def loss_of(forward, step):
    """Return the loss of a step."""
    inputs, targets = batch(step)
    return F.cross_entropy(forward(inputs).flatten(0, 1).float(), targets.flatten())


def adamw(model, **options):
    """Return AdamW over the model's parameters."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, **options)


def config_of(out, **config):
    """Return a strict configuration that writes to `out`."""
    return {"output_dir": str(out), "strict": True, **config}


def train(
    config=None,
    *,
    steps=STEPS,
    optimizer=adamw,
    autocast=None,
    scaler=None,
    before_step=None,
    wrap=None,
    compiler=None,
    settled=False,
):
    """Train, watched where a configuration is given; `before_step(model, step)` comes before each forward pass.

    `wrap` (a wrapper for parallel training) comes before `watch`, `compiler` after it. With `settled` each step waits
    for the recorder's word on the one before, so that nothing depends on who is faster.
    """
    inner = new_model()
    model = wrap(inner) if wrap else inner
    chosen = optimizer(model)
    monitor = trainsentry.TrainMonitor(config).watch(model, chosen) if config is not None else None
    forward = compiler(model) if compiler else model
    losses, stopped = [], None
    try:
        for step in range(steps):
            if settled and monitor is not None:
                monitor.flush()
            if before_step is not None:
                before_step(inner, step)
            losses.append(_step(forward, chosen, step, autocast, scaler, monitor))
    except trainsentry.TrainingStopped as stop:
        stopped = stop
    synchronize()
    incidents, records = (), None
    if monitor is not None:
        monitor.flush()
        incidents, records = monitor.incidents, monitor.records(last=1)
        monitor.close()
    weights = {name: whole(p) for name, p in inner.named_parameters()}
    state = [whole(t) for of in chosen.state.values() for t in of.values() if isinstance(t, torch.Tensor)]
    drawn = torch.rand(1).item(), torch.rand(1, device=DEVICE).item()
    return Ran([loss.item() for loss in losses], weights, state, drawn, incidents, stopped, records)


def _step(forward, optimizer, step, autocast, scaler, monitor):
    mixed = torch.autocast(DEVICE.type, dtype=autocast) if autocast else contextlib.nullcontext()
    with mixed:
        loss = loss_of(forward, step)
    optimizer.zero_grad()
    (scaler.scale(loss) if scaler else loss).backward()
    if monitor is not None:
        monitor.log(loss=loss)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return loss.detach()


def whole(tensor):
    """Return a copy on the host, of all shards."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()


def assert_same(a, b):
    """Losses, weights, state and the next random numbers are equal to the bit; NaN equals NaN."""
    assert [repr(x) for x in a.losses] == [repr(x) for x in b.losses]
    assert a.drawn == b.drawn
    assert a.weights.keys() == b.weights.keys()
    for x, y in zip([*a.weights.values(), *a.state], [*b.weights.values(), *b.state], strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x.nan_to_num(3.0), y.nan_to_num(3.0))


def flip_bit(name, at, bit=30, element=100):
    """Return a `before_step` that flips a bit in the storage of a parameter."""

    def before_step(model, step):
        if step == at:
            dict(model.named_parameters())[name].detach().view(-1).view(torch.int32)[element] ^= 1 << bit

    return before_step


def rows_of(records, quantity):
    """Return the rows of a quantity, by name."""
    return records[records["quantity"] == quantity].set_index("name")
