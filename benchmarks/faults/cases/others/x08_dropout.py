"""A dropout drops nine of ten."""

from case import Case, Expect


def _harm(run):
    if run.at_fault:
        run.module("blocks.1.attn.drop", "drop").p = 0.9


CASE = Case(
    "X08",
    "a dropout of 0.9",
    Expect(
        ("activation_output", "training"),
        ("spike", "shift", "dead", "underflow", "option_change"),
        {"gpt": ("blocks.1.attn.drop*",), "cnn": ("drop*",)},
    ),
    before_step=_harm,
)
