"""A collective gives zeros on one rank."""

import torch
import torch.distributed as dist
from case import Case, Expect
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
    lossy = run.at_fault and run.rank == 1
    calls = []

    def kernel(keyset, tensors, *args):
        tensors, work = operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, tensors, *args)
        calls.append(1)
        if lossy and len(calls) == 3:
            dist.Work.unbox(work).wait()
            tensors[0].zero_()
        return tensors, work

    operator = torch.ops.c10d.allreduce_.default
    library = torch.library.Library("c10d", "IMPL")
    library.impl("allreduce_", kernel, "ADInplaceOrView", with_keyset=True)
    try:
        _reduce(run)
    finally:
        library._destroy()


CASE = Case(
    "F17",
    "lost payload of a collective",
    Expect(("communication_output",), ("communication_mismatch",), rank=1, hard=True, within=1),
    ranks=2,
    build=_build,
    before_update=_lose,
)
