"""A tenfold drop of the learning rate: nothing is wrong."""

from case import Case, Expect


def _drop(run):
    if run.step == run.fault_step:
        run.schedule.base_lrs = [x / 10 for x in run.schedule.base_lrs]


CASE = Case("B3", "a tenfold drop of the learning rate", Expect(silent=True), before_step=_drop)
