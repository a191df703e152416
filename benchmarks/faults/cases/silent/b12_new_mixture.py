"""A new mixture of data: nothing is wrong."""

import torch
from case import Case, Expect


def _mix(run, inputs, targets):
    if run.step >= run.fault_step:
        keep = torch.rand(len(inputs), generator=run.generator) < 0.8
        return inputs[keep], targets[keep]
    return inputs, targets


CASE = Case("B12", "a new mixture of data", Expect(silent=True), batch=_mix)
