"""A router sends everything to one expert."""

import torch
from case import Case, Expect
from torch import nn


class Router(nn.Module):
    """Mixes four experts by a softmax."""

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.load = nn.Identity()

    def forward(self, x):
        """Return the mixture."""
        load = self.load(self.gate(x).softmax(-1))
        return x + sum(load[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def _build(run):
    run.plain.blocks[2].mlp = Router(64)


def _harm(run):
    if run.at_fault:
        with torch.no_grad():
            run.plain.blocks[2].mlp.gate.bias[0] += 50


CASE = Case(
    "F42",
    "router collapse",
    Expect(("activation_output", "parameter"), ("dead", "shift", "spike"), {"gpt": ("blocks.2.mlp*",)}),
    families=("gpt",),
    build=_build,
    before_step=_harm,
)
