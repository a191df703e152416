"""Two collectives change places on one rank."""

import torch
import torch.distributed as dist
from case import Case, Expect


def _harm(run):
    a, b = torch.ones(16) * (run.rank + 1), torch.ones(32) * (run.rank + 2)
    first, second = (b[:16], a) if run.at_fault and run.rank == 1 else (a, b[:16])
    dist.all_reduce(first)
    dist.all_reduce(second, op=dist.ReduceOp.MAX if not run.at_fault or run.rank == 0 else dist.ReduceOp.SUM)


CASE = Case(
    "F50",
    "collectives in another order",
    Expect(("communication_input", "communication_output"), ("communication_mismatch", "hang"), hard=True, within=1),
    ranks=2,
    before_update=_harm,
)
