"""An exponent bit of optimizer state flips."""

from case import Case, Expect
from training import flip_bit


def _harm(run):
    if run.at_fault:
        p = run.parameter("blocks.1.mlp.fc2.weight", "stages.1.conv.weight")
        key = "exp_avg" if run.optimizer_name == "adamw" else "momentum_buffer"
        flip_bit(run.optimizer.state[p][key], 3, 30)


CASE = Case(
    "X04",
    "exponent bit flip in optimizer state",
    Expect(
        ("exp_avg", "momentum_buffer"),
        ("spike", "overflow", "nonfinite"),
        {"gpt": ("blocks.1.mlp.fc2.weight",), "cnn": ("stages.1.conv.weight",)},
    ),
    before_update=_harm,
)
