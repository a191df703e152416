"""The optimizer holds parameters that the model no longer uses."""

from case import Case, Expect
from torch import nn


def _harm(run):
    if run.at_fault:
        for module in run.plain.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(p.detach().clone()))


CASE = Case(
    "F26",
    "stale parameters in the optimizer",
    Expect(("optimizer", "update"), ("frozen",), hard=True, within=1),
    before_step=_harm,
)
