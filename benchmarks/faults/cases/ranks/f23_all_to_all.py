"""The parts of an all_to_all are swapped on one rank."""

import torch
import torch.distributed as dist
from case import Case, Expect
from communication_hooks import losing


def _exchange(run):
    mine = torch.randn(8, 4, generator=run.generator)
    with losing("alltoall_base_", lambda number: run.at_fault and run.rank == 1):
        dist.all_to_all_single(torch.empty(8, 4), mine)


CASE = Case(
    "F23",
    "all_to_all with wrong splits",
    Expect(("communication_output",), ("communication_mismatch",)),
    ranks=2,
    before_update=_exchange,
)
