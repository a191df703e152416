"""Small MindSpore models and training loops that the tests share."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

import trainsentry


class Block(nn.Cell):
    """A residual block of two layers."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm((width,))
        self.up = nn.Dense(width, 2 * width)
        self.down = nn.Dense(2 * width, width)

    def construct(self, x):
        return x + self.down(ops.relu(self.up(self.norm(x))))


class Net(nn.Cell):
    """A few blocks and a head."""

    def __init__(self, width=8, layers=3):
        super().__init__()
        self.inp = nn.Dense(4, width)
        self.blocks = nn.CellList([Block(width) for _ in range(layers)])
        self.head = nn.Dense(width, 2)

    def construct(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(**kwargs):
    """A model with fixed weights."""
    ms.set_seed(1)
    made = Net(**kwargs)
    rng = np.random.default_rng(0)
    for p in made.get_parameters():
        p.set_data(Tensor((rng.standard_normal(p.shape) * 0.2 + ("gamma" in p.name)).astype(np.float32)))
    made.set_train()
    return made


def batches(steps, rows=16):
    """Regression data, the same each time."""
    rng = np.random.default_rng(3)
    for _ in range(steps):
        x = rng.standard_normal((rows, 4)).astype(np.float32)
        yield Tensor(x), Tensor(np.stack([x.sum(1), x[:, 0] * x[:, 1]], 1).astype(np.float32))


def train(model, optimizer, steps, monitor=None, before_step=lambda n: None):
    """Train in the functional style; return the losses."""
    loss_fn = nn.MSELoss()
    grad = ms.value_and_grad(lambda x, y: loss_fn(model(x), y), None, optimizer.parameters)
    losses = []
    for n, (x, y) in enumerate(batches(steps)):
        before_step(n)
        loss, grads = grad(x, y)
        if monitor is not None:
            monitor.log(loss=loss)
        optimizer(grads)
        losses.append(float(loss.asnumpy()))
    return losses


def weights(model):
    """Copies of all weights."""
    return [p.asnumpy().copy() for p in model.get_parameters()]


EVERY_STEP = {part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state", "updates", "activations")}


def watch(out, model, optimizer, **config):
    """Watch strictly, every quantity at every step, without detection."""
    config = {"output_dir": str(out), "strict": True, "detect": False, "collect": EVERY_STEP, **config}
    return trainsentry.TrainMonitor(config).watch(model, optimizer)


def dataset(steps):
    """The same data for `Model.train`."""
    data = [(x.asnumpy(), y.asnumpy()) for x, y in batches(steps)]
    return ms.dataset.GeneratorDataset(data, ["x", "y"], shuffle=False)
