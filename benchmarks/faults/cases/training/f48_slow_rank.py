"""One rank is slow."""

import time

from case import Case, Expect


def _harm(run):
    if run.harmed and run.rank == 1:
        time.sleep(0.05)


CASE = Case(
    "F48",
    "a slow rank",
    Expect(("training",), ("straggler",), rank=1, within=25),
    ranks=2,
    before_step=_harm,
)
