"""Heavy-tailed data: nothing is wrong."""

from case import Case, Expect


def _build(run):
    run.data.heavy = True


CASE = Case("B15", "heavy-tailed data", Expect(silent=True), families=("cnn",), build=_build)
