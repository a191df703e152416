"""The demo on MindSpore: an ordinary functional training loop, and a fault in one weight."""

import random
from collections.abc import Callable, Mapping
from pydoc_data import topics
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from trainsentry.monitor.demo.outcome import Flip, Outcome
from trainsentry.monitor.errors import TrainingStopped
from trainsentry.monitor.train_monitor import TrainMonitor

WIDTH: Final = 64
LAYERS: Final = 3
CONTEXT: Final = 32
BATCH: Final = 8
VOCABULARY: Final = 256
LEARNING_RATE: Final = 2e-3
BITS: Final = {"flip": (30,), "soft": (25, 26)}
"""Bits of a float32 by kind of fault: bit 30 multiplies a small weight by 2^128, bit 25 by 16, bit 26 by 256."""


class TransformerCell(nn.Cell):  # type: ignore[misc] # MindSpore has no types
    """A pre-norm residual block: causal self-attention of one head, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm((WIDTH,))
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH)
        self.proj = nn.Dense(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm((WIDTH,))
        self.up = nn.Dense(WIDTH, 4 * WIDTH)
        self.down = nn.Dense(4 * WIDTH, WIDTH)
        self.mask = Tensor(np.triu(np.full((CONTEXT, CONTEXT), -1e9, np.float32), 1))

    def construct(self, x: Tensor) -> Tensor:
        """Map (batch, CONTEXT, WIDTH) to the same shape."""
        q, k, v = ops.split(self.qkv(self.norm1(x)), WIDTH, axis=-1)
        scores = ops.matmul(q, k.swapaxes(-1, -2)) / WIDTH**0.5 + self.mask
        x = x + self.proj(ops.matmul(ops.softmax(scores, -1), v))
        return x + self.down(ops.relu(self.up(self.norm2(x))))


class Gpt(nn.Cell):  # type: ignore[misc] # MindSpore has no types
    """A small GPT over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = Parameter(Tensor(np.zeros((CONTEXT, WIDTH), np.float32)))
        self.blocks = nn.CellList([TransformerCell() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm((WIDTH,))
        self.head = nn.Dense(WIDTH, VOCABULARY, has_bias=False)

    def construct(self, tokens: Tensor) -> Tensor:
        """Map bytes of shape (batch, CONTEXT) to logits of shape (batch, CONTEXT, VOCABULARY)."""
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(
    config: Mapping[str, Any],
    *,
    steps: int = 150,
    seed: int = 0,
    fault: str = "flip",
    fault_parameter: str | None = None,
    progress: Callable[[int, float], None] = lambda _step, _loss: None,
) -> Outcome:
    """Train the byte-level GPT under a monitor with `config`, with a fault in one weight midway.

    `fault` is `flip`, `hard` or `none`. `progress` gets step and loss.

    Raises:
        ValueError: when the model has no parameter `fault_parameter`.

    """
    ms.set_seed(seed)
    model = Gpt()
    model.set_train()
    named = dict(model.parameters_and_names())
    if fault_parameter is not None and fault_parameter not in named:
        raise ValueError(f"--fault-parameter: {fault_parameter!r}; allowed: {', '.join(named)}")
    optimizer = nn.AdamWeightDecay(model.trainable_params(), LEARNING_RATE, weight_decay=0.01)
    loss_fn = nn.CrossEntropyLoss()

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(model(tokens).reshape((-1, VOCABULARY)), targets.reshape((-1,)))

    grad = ms.value_and_grad(forward, None, optimizer.parameters)
    batches = _batches(seed)
    losses: list[float] = []
    flip, stopped = None, None
    monitor = TrainMonitor(config)
    with monitor.watch(model, optimizer):
        try:
            for step in range(steps):
                tokens, targets = next(batches)
                if step == steps // 2 and fault != "none":
                    flip = _flip(named, fault, seed, fault_parameter)
                loss, gradients = grad(tokens, targets)
                monitor.log(loss=loss)
                losses.append(float(loss.asnumpy()))
                progress(step, losses[-1])
                optimizer(gradients)
        except TrainingStopped as stop:
            stopped = stop
    at = steps // 2 if flip is not None else None
    return Outcome(len(losses), tuple(losses), flip, at, monitor.incidents, stopped)


def _batches(seed: int) -> Any:
    """Yield random windows of Python's language reference: the bytes, and the bytes shifted by one."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    data = np.frombuffer(text, np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(data) - CONTEXT - 1, BATCH)
        rows = np.stack([data[s : s + CONTEXT + 1] for s in starts])
        yield Tensor(rows[:, :-1]), Tensor(rows[:, 1:])


def _flip(named: Mapping[str, Parameter], kind: str, seed: int, parameter: str | None) -> Flip:
    """Set a clear bit of a weight that every batch uses, in the weight's memory."""
    choice = random.Random(seed)  # noqa: S311 - a fault, not a secret
    names = [parameter] if parameter is not None else [n for n in named if not n.startswith("token")]
    name, bit = choice.choice(names), choice.choice(BITS[kind])
    values = named[name].asnumpy()
    flat = values.reshape(-1)
    words = flat.view(np.uint32)
    candidates = np.flatnonzero(((words >> bit) & 1 == 0) & (flat != 0))
    element = int(choice.choice(candidates.tolist()))
    before = float(flat[element])
    words[element] ^= np.uint32(1 << bit)  # the array is the parameter's memory
    return Flip(name, element, bit, before, float(flat[element]))
