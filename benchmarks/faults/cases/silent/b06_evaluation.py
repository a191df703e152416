"""Evaluation in between: nothing is wrong."""

import torch
from case import Case, Expect


def _evaluate(run):
    if run.step % 20 == 10:
        run.model.eval()
        with torch.no_grad():
            inputs, _ = run.data.batch(64, torch.Generator().manual_seed(5))
            run.model(inputs)
        run.model.train()


CASE = Case("B6", "evaluation in between", Expect(silent=True), before_step=_evaluate)
