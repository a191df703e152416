"""Trains with a buffer that every rank changes alike, as a router's bias is, until one rank's copy is changed."""

import torch
import torch.distributed as dist
from replica_faults import known_incidents
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainsentry

STEPS = 40
FAULT_STEP = 21


class Routed(nn.Module):
    """A layer with a bias that is a buffer, which follows the number of passes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("bias", torch.linspace(0.1, 0.8, 8))

    def forward(self, x):
        self.bias.mul_(0.99)
        return self.layer(x) + self.bias


class Convolution(nn.Module):
    """A convolution whose batch norm has statistics of all ranks' data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(1, 8, 3)
        self.register_buffer("bias", torch.linspace(0.1, 0.8, 8))

    def forward(self, x):
        y = self.layer(x[:, None])
        with torch.no_grad():
            mean = y.mean((0, 2))
            dist.all_reduce(mean)
            self.bias.lerp_(mean / dist.get_world_size(), 0.1)
        return y - self.bias[:, None]


def run(family, out, *, rank=None):
    """Train; change one element of the buffer on `rank`. Return the incidents that each rank knows."""
    torch.manual_seed(0)
    model = DistributedDataParallel({"routed": Routed, "convolution": Convolution}[family](), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    config = {"output_dir": str(out), "collect": {"parameters": {"every": 1}}, "on_incident": {"dump": False}}
    monitor = trainsentry.TrainMonitor(config).watch(model, optimizer)
    for step in range(STEPS):
        if step == FAULT_STEP and dist.get_rank() == rank:
            model.module.bias[3] += 1e-3
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return known_incidents(monitor)
