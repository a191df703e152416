"""One rank does not come to a collective."""

import time

from case import Case, Expect


def _harm(run):
    if run.at_fault and run.rank == 1:
        time.sleep(12.0)


CASE = Case(
    "F49",
    "a rank that hangs",
    Expect(("communication_input",), ("hang",), rank=1, hard=True, within=1),
    ranks=2,
    before_step=_harm,
    config={"hang_check": {"seconds": 2.0}},
    families=("cnn",),
)
