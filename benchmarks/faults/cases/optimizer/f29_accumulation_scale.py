"""The loss is not divided by the number of micro-steps."""

from case import Case, Expect


def _build(run):
    run.accumulation = 4


def _harm(run, loss):
    return loss * run.accumulation if run.harmed else loss


CASE = Case(
    "F29",
    "accumulation scaling error",
    Expect(("training", "gradient"), ("shift",), {"": ("all",)}),
    build=_build,
    loss=_harm,
)
