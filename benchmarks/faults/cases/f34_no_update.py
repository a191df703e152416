"""The compiled step updates nothing."""

import torch
from case import Case, Expect


def _nothing(*args, **kwargs):
    return None


def _harm(run):
    if run.at_fault:
        run.notes["kept"] = torch.optim.adam.adam, torch.optim.sgd.sgd
        torch.optim.adam.adam = torch.optim.sgd.sgd = _nothing
    if run.is_faulty and run.step == run.steps - 1:
        torch.optim.adam.adam, torch.optim.sgd.sgd = run.notes["kept"]


CASE = Case(
    "F34",
    "a step that updates nothing",
    Expect(("optimizer", "update"), ("frozen",), hard=True, within=1),
    before_step=_harm,
)
