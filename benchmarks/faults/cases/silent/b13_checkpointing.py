"""Activation checkpointing switched on and off: nothing is wrong."""

from case import Case, Expect
from torch.utils.checkpoint import checkpoint


def _build(run):
    inner = run.plain.blocks[1].mlp if run.family == "gpt" else run.plain.stages[1]
    forward = inner.forward

    def switched(x):
        on = run.step % 40 >= 20
        return checkpoint(forward, x, use_reentrant=False) if on else forward(x)

    inner.forward = switched


CASE = Case("B13", "activation checkpointing switched on and off", Expect(silent=True), build=_build)
