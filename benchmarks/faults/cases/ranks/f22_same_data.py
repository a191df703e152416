"""Two ranks draw the same data."""

from case import Case, Expect


def _harm(run):
    if run.at_fault:
        run.generator.manual_seed(run.seed)


CASE = Case(
    "F22",
    "the same data on two ranks",
    Expect(("data",), ("duplicate_data",)),
    ranks=2,
    before_step=_harm,
)
