"""A batch that grows: nothing is wrong."""

from case import Case, Expect


def _grow(run):
    run.size = 16 * (1 + run.step // 40)
    run.declared["batch_size"] = run.size


CASE = Case("B4", "a batch that grows", Expect(silent=True), before_step=_grow)
