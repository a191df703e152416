"""Gradients underflow in fp16."""

from case import Case, Expect


def _harm(run):
    if run.harmed:
        for p in run.plain.parameters():
            small = 2.0**-14
            p.grad.copy_((p.grad * small).half().float() / small)


CASE = Case(
    "F05",
    "gradients underflow in fp16",
    Expect(("gradient",), ("underflow",)),
    before_update=_harm,
)
