"""The loss is a thousand times too large once."""

from case import Case, Expect


def _harm(run, loss):
    return loss * 1000 if run.at_fault else loss


CASE = Case(
    "X12",
    "a loss times 1000 at one step",
    Expect(("training", "gradient"), ("shift", "spike"), {"": ("all",)}),
    loss=_harm,
)
