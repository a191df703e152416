"""Sequences that grow longer: nothing is wrong."""

from case import Case, Expect


def _lengthen(run):
    run.data.length = 16 if run.step < run.fault_step else 32
    run.declared["sequence_length"] = run.data.length


CASE = Case("B9", "sequences that grow longer", Expect(silent=True), families=("gpt",), before_step=_lengthen)
