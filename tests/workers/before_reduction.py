"""A NaN in one rank's own gradient, and the rows that were written of gradients before any reduction."""

import math

import torch.distributed as dist
from written_files import table

CONFIG = {"collect": {"gradients": {"every": 1, "before_reduction": True}}, "export": {"max_wait": 1.0}}


def poison(strategy, out, micro_step):
    """Make what flows back NaN on rank 1, in the second micro-batch where there are two."""
    if dist.get_rank() == 1 and micro_step == strategy.micro_steps - 1:
        out.register_hook(lambda gradient: gradient * math.nan)
    return out


def by_rank(out, quantity):
    """Return the rows of a quantity on each of two ranks, by (step, micro-step, name)."""
    return [
        {(int(row["step"]), int(row["micro_step"]), row["name"]): row for row in table(out, rank, quantity)}
        for rank in range(2)
    ]
