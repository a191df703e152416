"""A layer's weights are zeroed."""

import torch
from case import Case, Expect


def _harm(run):
    if run.at_fault:
        with torch.no_grad():
            run.parameter("blocks.2.mlp.fc1.weight", "stages.2.conv.weight").mul_(1e-6)


CASE = Case(
    "X03",
    "a layer's weights vanish",
    Expect(
        ("parameter",),
        ("dead", "spike", "shift"),
        {"gpt": ("blocks.2.mlp.fc1.weight",), "cnn": ("stages.2.conv.weight",)},
    ),
    before_step=_harm,
)
