"""Labels are off by one."""

from case import Case, Expect


def _harm(run, inputs, targets):
    if run.harmed:
        return inputs, targets.roll(1, -1) if run.family == "gpt" else (targets + 1) % 4
    return inputs, targets


CASE = Case("F46", "labels off by one", Expect(("data", "loss"), ("shift", "spike", "drift")), batch=_harm)
