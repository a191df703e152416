"""One rank's learning rate is larger."""

from case import Case, Expect


def _harm(run):
    if run.harmed and run.rank == 1:
        for group in run.optimizer.param_groups:
            group["lr"] *= 1.1


CASE = Case(
    "X11",
    "another learning rate on one rank",
    Expect(("parameter",), ("replica_mismatch",), hard=True, within=1),
    ranks=2,
    before_update=_harm,
)
