"""One small model, and the base of every strategy that distributes it."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

LR = 1e-2


class Net(nn.Module):
    """Parameters of odd sizes: some smaller than the number of ranks, none that 2 or 4 divide evenly."""

    def __init__(self, hidden=13):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, hidden), nn.GELU(), nn.Linear(hidden, 5))
        self.norm = nn.LayerNorm(5)
        self.module = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.module(self.norm(self.inner(x))) * self.gain


def batches(steps, micro_steps=1, seed=0):
    """The same on every rank and in a single process: rank r of n takes rows r::n."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(8, 7, generator=generator) for _ in range(micro_steps)] for _ in range(steps)]


def make_net(dtype=torch.float32, hidden=13):
    torch.manual_seed(1)
    return Net(hidden).to(dtype)


class Strategy:
    """A model and its optimizer, distributed; `gathered` returns whole tensors by quantity and name."""

    accumulate_locally = False

    def __init__(self, dtype, micro_steps):
        self.micro_steps = micro_steps
        self.updates = 0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.build(dtype)

    def build(self, dtype):
        self.plain = make_net(dtype)
        self.model = self.plain
        self.optimizer = self.make_optimizer(self.model.parameters())

    def make_optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=LR)

    def share(self, x):
        return x[self.rank :: self.size]

    def step(self, micro_batches, poison=None):
        for i, x in enumerate(micro_batches):
            with self.context(i == len(micro_batches) - 1):
                out = self.model(self.share(x).to(self.input_dtype()))
                if poison is not None:
                    out = poison(self, out, i)
                (out.float().square().mean() / len(micro_batches)).backward()

    def input_dtype(self):
        return next(self.plain.parameters()).dtype

    def context(self, last):
        return contextlib.nullcontext()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self, tensor):
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().double().clone()

    def names(self):
        return dict(self.model.named_parameters())

    def gathered(self, gradients=True):
        found = {"parameter": {}, "gradient": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for name, parameter in self.names().items():
            found["parameter"][name] = self.whole(parameter)
            if parameter.grad is not None:
                found["gradient"][name] = self.whole(parameter.grad)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key != "step":
                    found[key][name] = self.whole(value)
        return found


class Plain(Strategy):
    def share(self, x):
        return x
