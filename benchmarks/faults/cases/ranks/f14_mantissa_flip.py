"""Mantissa bit flip in one replica's weight."""

from case import Case, Expect
from training import flip_bit


def _harm(run):
    if run.at_fault and run.rank == 1:
        flip_bit(run.parameter("blocks.1.attn.v_proj.weight", "stages.1.conv.weight"), 7, 10)


CASE = Case(
    "F14",
    "mantissa bit flip in one replica's weight",
    Expect(
        ("parameter",),
        ("replica_mismatch",),
        {"gpt": ("blocks.1.attn.v_proj.weight",), "cnn": ("stages.1.conv.weight",)},
        hard=True,
        within=1,
    ),
    ranks=2,
    before_step=_harm,
)
