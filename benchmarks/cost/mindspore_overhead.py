"""Measures what the monitor adds to a MindSpore step on CPU: all gradients at every step, a transformer of six layers.

Run with the environment that `make mindspore` builds: .venv-mindspore/bin/python benchmarks/cost/mindspore_overhead.py
Bare and monitored blocks of steps alternate in one process; the figure is the median ratio monitored ÷ bare over pairs
of blocks.
"""

import argparse
import os
import statistics
import tempfile
import time

os.environ.setdefault("GLOG_v", "3")

import sys
from pathlib import Path

import mindspore as ms
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine
from mindspore import Tensor, nn, ops

import trainsentry

WIDTH, LAYERS, SEQUENCE, BATCH = 256, 6, 128, 8


class Block(nn.Cell):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))
        self.qkv, self.proj = nn.Dense(WIDTH, 3 * WIDTH), nn.Dense(WIDTH, WIDTH)
        self.up, self.down = nn.Dense(WIDTH, 4 * WIDTH), nn.Dense(4 * WIDTH, WIDTH)

    def construct(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, width) to the same shape."""
        q, k, v = ops.split(self.qkv(self.norm1(x)), WIDTH, axis=-1)
        x = x + self.proj(ops.matmul(ops.softmax(ops.matmul(q, k.swapaxes(-1, -2)) / WIDTH**0.5, -1), v))
        return x + self.down(ops.relu(self.up(self.norm2(x))))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    options = parser.parse_args()
    ms.set_seed(0)
    model = nn.SequentialCell(*[Block() for _ in range(LAYERS)], nn.Dense(WIDTH, 64))
    model.set_train()
    optimizer = nn.Adam(model.trainable_params(), 1e-4)
    rng = np.random.default_rng(0)
    x = Tensor(rng.standard_normal((BATCH, SEQUENCE, WIDTH)).astype(np.float32))
    y = Tensor(rng.integers(0, 64, (BATCH * SEQUENCE,)).astype(np.int32))
    loss_fn = nn.CrossEntropyLoss()
    grad = ms.value_and_grad(lambda x, y: loss_fn(model(x).reshape((-1, 64)), y), None, optimizer.parameters)

    def block() -> float:
        begin = time.perf_counter()
        for _ in range(options.steps):
            loss, gradients = grad(x, y)
            optimizer(gradients)
            loss.asnumpy()
        return (time.perf_counter() - begin) / options.steps

    off = {"parameters": False, "optimizer_state": False, "updates": False, "activations": False}
    everything = {p: {"every": 1} for p in ("gradients", "parameters", "optimizer_state", "updates", "activations")}
    print(describe_machine())
    print(f"{len(optimizer.parameters)} parameters, {sum(p.size for p in optimizer.parameters) / 1e6:.1f} M elements")
    block()
    for name, collect in (("gradients, every step", {"gradients": {"every": 1}, **off}), ("everything", everything)):
        ratios, added = [], []
        for _ in range(options.pairs):
            bare = block()
            with tempfile.TemporaryDirectory() as folder:
                config = {"output_dir": folder, "collect": collect}
                with trainsentry.TrainMonitor(config).watch(model, optimizer):
                    block()
                    watched = block()
            ratios.append(watched / bare)
            added.append((watched - bare) * 1e3)
        print(
            f"{name}: {statistics.median(ratios):.3f} of a bare step ({min(ratios):.3f} to {max(ratios):.3f}), "
            f"{statistics.median(added):.1f} ms added to {bare * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
