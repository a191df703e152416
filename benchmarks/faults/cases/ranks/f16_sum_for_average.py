"""Gradients are summed where they should be averaged."""

import torch.distributed as dist
from case import Case, Expect
from communication_hooks import average
from torch import nn


def _build(run):
    def hook(state, bucket):
        if run.harmed:
            bucket.buffer().mul_(dist.get_world_size())
        return average(bucket)

    run.model = nn.parallel.DistributedDataParallel(run.plain, bucket_cap_mb=0.05)
    run.model.register_comm_hook(None, hook)


CASE = Case(
    "F16",
    "SUM for AVG",
    Expect(("communication_output", "gradient"), ("communication_mismatch", "shift")),
    ranks=2,
    build=_build,
)
