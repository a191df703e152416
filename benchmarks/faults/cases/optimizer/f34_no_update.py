"""The compiled step updates nothing."""

import importlib

from case import Case, Expect

ADAM, SGD = (importlib.import_module(f"torch.optim.{name}") for name in ("adam", "sgd"))


def _nothing(*args, **kwargs):
    return None


def _harm(run):
    if run.at_fault:
        run.notes["kept"] = ADAM.adam, SGD.sgd
        ADAM.adam = SGD.sgd = _nothing
    if run.is_faulty and run.step == run.steps - 1:
        ADAM.adam, SGD.sgd = run.notes["kept"]


CASE = Case(
    "F34",
    "a step that updates nothing",
    Expect(("optimizer", "update"), ("frozen",), hard=True, within=1),
    before_step=_harm,
)
