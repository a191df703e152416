"""Plants a NaN in one rank's own gradient, and reads the rows of gradients before reduction."""

import math

import torch.distributed as dist
from written_files import table

CONFIG = {"collect": {"gradients": {"every": 1, "before_reduction": True}}, "export": {"max_wait": 1.0}}


def poison(strategy, out, micro_step):
    """Make the gradient of the output NaN on rank 1, in the last micro-batch."""
    if dist.get_rank() == 1 and micro_step == strategy.micro_steps - 1:
        out.register_hook(lambda gradient: gradient * math.nan)
    return out


def by_rank(out, quantity):
    """Return the rows of a quantity on each of two ranks, by (step, micro-step, name)."""
    return [
        {(int(row["step"]), int(row["micro_step"]), row["name"]): row for row in table(out, rank, quantity)}
        for rank in range(2)
    ]
