"""One batch is garbage."""

from case import Case, Expect


def _harm(run, inputs, targets):
    if run.at_fault:
        return inputs * 0 + 1, targets * 0 + 1
    return inputs, targets


CASE = Case("F44", "a garbage batch", Expect(("data",), ("spike", "shift", "dead")), batch=_harm)
