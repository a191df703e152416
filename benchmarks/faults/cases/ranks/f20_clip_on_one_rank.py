"""Gradients are clipped on one rank only."""

import torch
from case import Case, Expect


def _harm(run):
    if run.harmed and run.rank == 0:
        torch.nn.utils.clip_grad_norm_(run.plain.parameters(), 1e-3)


CASE = Case(
    "F20",
    "clipping on one rank only",
    Expect(("parameter", "gradient"), ("replica_mismatch",), hard=True, within=1),
    ranks=2,
    before_update=_harm,
)
