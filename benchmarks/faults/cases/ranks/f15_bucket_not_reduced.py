"""One bucket is not reduced."""

import torch
from case import Case, Expect
from communication_hooks import average
from torch import nn


def _build(run):
    def hook(state, bucket):
        if run.harmed and bucket.index() == 1:
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        return average(bucket)

    run.model = nn.parallel.DistributedDataParallel(run.plain, bucket_cap_mb=0.01)
    run.model.register_comm_hook(None, hook)


CASE = Case(
    "F15",
    "one bucket not reduced",
    Expect(("gradient",), ("replica_mismatch",), hard=True, within=1),
    ranks=2,
    build=_build,
)
