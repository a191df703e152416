"""A GELU is computed in another way."""

from case import Case, Expect
from torch import nn


def _harm(run):
    if run.at_fault:
        for module in run.plain.modules():
            if isinstance(module, nn.GELU):
                module.approximate = "tanh"


CASE = Case(
    "F51",
    "another kernel of an activation",
    Expect(("activation_output",), ("shift", "drift"), {"": ("*.act*",)}),
    families=("gpt",),
    before_step=_harm,
)
