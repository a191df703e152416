"""Every label is the same."""

from case import Case, Expect


def _harm(run, inputs, targets):
    return inputs, targets * 0 if run.harmed else targets


CASE = Case("X10", "every label the same", Expect(("data", "loss"), ("spike", "shift", "drift")), batch=_harm)
