"""A norm's gain changes its sign."""

import torch
from case import Case, Expect


def _harm(run):
    if run.at_fault:
        with torch.no_grad():
            run.parameter("blocks.1.ln2.weight", "stages.1.norm.weight").neg_()


CASE = Case(
    "X01",
    "a norm's gain changes sign",
    Expect(("parameter",), ("spike", "shift"), {"gpt": ("blocks.1.ln2.weight",), "cnn": ("stages.1.norm.weight",)}),
    before_step=_harm,
)
