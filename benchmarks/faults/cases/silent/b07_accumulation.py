"""Another accumulation, scaled rightly: nothing is wrong."""

from case import Case, Expect


def _accumulate(run):
    run.accumulation = 1 if run.step < run.fault_step else 4


CASE = Case("B7", "another accumulation, scaled rightly", Expect(silent=True), before_step=_accumulate)
