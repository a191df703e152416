"""The training run of the demo: an ordinary loop that trainsentry watches, and a fault in one weight."""

import math
from collections.abc import Callable, Mapping
from pydoc_data import topics
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from trainsentry.monitor.demo.fault import check_parameter, flip_weight
from trainsentry.monitor.demo.model import Gpt, GptConfig
from trainsentry.monitor.demo.outcome import Outcome
from trainsentry.monitor.errors import TrainingStopped
from trainsentry.monitor.train_monitor import TrainMonitor

LEARNING_RATE: Final = 2e-3
WARM_UP: Final = 10
BATCH: Final = 8


def train(
    config: Mapping[str, Any],
    *,
    steps: int = 150,
    seed: int = 0,
    fault: str = "flip",
    fault_parameter: str | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, float], None] = lambda _step, _loss: None,
) -> Outcome:
    """Train the byte-level GPT under a monitor with `config`, with a fault in one weight midway.

    `fault` is `flip`, `soft` or `none` (see `fault.BITS`). `device` holds the model. `progress` gets step and loss.
    """
    torch.manual_seed(seed)
    sizes = GptConfig()
    model = Gpt(sizes).to(device)  # the weights of a seed are the same on every device
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    if fault_parameter is not None:
        check_parameter(model, fault_parameter)
    batches = Batches(BATCH, sizes.context, seed)
    losses: list[float] = []
    flip, stopped = None, None
    monitor = TrainMonitor(config)
    with monitor.watch(model, optimizer):
        try:
            for step in range(steps):
                tokens, targets = (part.to(device) for part in batches.draw())
                if step == steps // 2 and fault != "none":
                    flip = flip_weight(model, tokens, fault, seed, fault_parameter)
                logits = model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                monitor.log(loss=loss, learning_rate=schedule.get_last_lr()[0])
                losses.append(loss.item())
                progress(step, losses[-1])
                optimizer.step()
                schedule.step()
        except TrainingStopped as stop:
            stopped = stop
    at = steps // 2 if flip is not None else None
    return Outcome(len(losses), tuple(losses), flip, at, monitor.incidents, stopped)


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear warm-up, then cosine decay to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / max(steps - WARM_UP, 1)))


def language_reference() -> Tensor:
    """Return Python's language reference (the text of `help()`) as one uint8 tensor of bytes, about 460 kB."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Batches:
    """Random windows of the text: inputs and the bytes that follow, both of shape (batch, length)."""

    def __init__(self, batch: int, length: int, seed: int) -> None:
        self.data = language_reference()
        self.batch = batch
        self.length = length
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return the next batch."""
        last = len(self.data) - self.length - 1
        starts = torch.randint(0, last, (self.batch,), generator=self._generator)
        rows = torch.stack([self.data[s : s + self.length + 1] for s in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]
