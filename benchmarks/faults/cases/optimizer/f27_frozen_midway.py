"""A block is frozen midway."""

from case import Case, Expect


def _harm(run):
    if run.at_fault:
        for p in run.module("blocks.0", "stages.1").parameters():
            p.requires_grad_(False)


CASE = Case(
    "F27",
    "a block frozen midway",
    Expect(("update",), ("frozen",), {"gpt": ("blocks.0.*",), "cnn": ("stages.1.*",)}, hard=True, within=1),
    before_step=_harm,
)
