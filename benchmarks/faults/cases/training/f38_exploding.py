"""One block is initialised eight times too large."""

import torch
from case import Case, Expect


def _build(run):
    with torch.no_grad():
        for p in run.module("blocks.1", "stages.1.conv").parameters():
            p.mul_(8)


CASE = Case(
    "F38",
    "one block initialised too large",
    Expect(
        ("gradient", "activation_output", "parameter", "activation_grad_input"),
        ("shift",),
        {"gpt": ("blocks.1.*",), "cnn": ("stages.1.*",)},
    ),
    build=_build,
    from_start=True,
)
