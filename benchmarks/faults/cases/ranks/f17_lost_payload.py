"""A collective gives zeros on one rank."""

import torch
import torch.distributed as dist
from case import Case, Expect
from communication_hooks import losing
from torch import nn


class Unwrapped(nn.Module):
    """A model that reduces its gradients by itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        """Return what the model returns."""
        return self.inner(x)


def _build(run):
    run.model = Unwrapped(run.plain)


def _reduce(run):
    for p in run.plain.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    parts = torch.zeros(2 * 64)
    dist.all_gather_into_tensor(parts, torch.randn(64, generator=run.generator))


def _lose(run):
    with losing("allreduce_", lambda number: run.at_fault and run.rank == 1 and number == 3):
        _reduce(run)


CASE = Case(
    "F17",
    "lost payload of a collective",
    Expect(("communication_output",), ("communication_mismatch",), rank=1, hard=True, within=1),
    ranks=2,
    build=_build,
    before_update=_lose,
)
