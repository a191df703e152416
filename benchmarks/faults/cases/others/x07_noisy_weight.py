"""Noise gets into a weight."""

import torch
from case import Case, Expect


def _harm(run):
    if run.at_fault:
        p = run.parameter("blocks.3.mlp.fc2.weight", "stages.3.conv.weight").data  # torch counts no write
        p.add_(torch.randn_like(p) * p.std() * 3)


CASE = Case(
    "X07",
    "noise in a weight",
    Expect(("parameter",), ("spike", "shift"), {"gpt": ("blocks.3.mlp.fc2.weight",), "cnn": ("stages.3.conv.weight",)}),
    before_step=_harm,
)
