"""Inputs are no longer normalised."""

from case import Case, Expect


def _harm(run, inputs, targets):
    return (inputs * 255 if run.harmed else inputs), targets


CASE = Case(
    "X02",
    "inputs no longer normalised",
    Expect(("data",), ("spike", "shift")),
    families=("cnn",),
    batch=_harm,
)
