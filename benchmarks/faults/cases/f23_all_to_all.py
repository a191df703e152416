"""The parts of an all_to_all are swapped on one rank."""

import torch
import torch.distributed as dist
from case import Case, Expect


def _exchange(run):
    mine = torch.randn(8, 4, generator=run.generator)
    got = torch.empty(8, 4)
    dist.all_to_all_single(got, mine)
    if run.at_fault and run.rank == 1:
        dist.all_to_all_single(got, mine.flip(0) * 0 + mine)
        got[:4] = 0
    elif run.at_fault:
        dist.all_to_all_single(got, mine)


CASE = Case(
    "F23",
    "all_to_all with wrong splits",
    Expect(("communication_output",), ("communication_mismatch",)),
    ranks=2,
    before_update=_exchange,
)
