"""An Inf makes clipping zero the update."""

import torch
from case import Case, Expect


def _harm(run):
    if run.at_fault:
        run.parameter("blocks.0.mlp.fc2.weight", "stages.1.conv.weight").grad.view(-1)[5] = float("inf")
    torch.nn.utils.clip_grad_norm_([p for p in run.plain.parameters() if p is not None], 1e9)


CASE = Case(
    "F06",
    "Inf in a gradient, clipping zeroes the update",
    Expect(("gradient",), ("nonfinite",)),
    before_update=_harm,
)
