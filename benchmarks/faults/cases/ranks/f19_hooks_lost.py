"""The wrapped module is called, so that nothing is reduced."""

from case import Case, Expect


def _harm(run):
    if run.at_fault:
        run.notes["ddp"], run.model = run.model, run.plain


CASE = Case(
    "F19",
    "DDP's hooks lost",
    Expect(("gradient",), ("replica_mismatch",), hard=True, within=1),
    ranks=2,
    before_step=_harm,
)
