"""A loss scale that moves: nothing is wrong."""

from case import Case, Expect


def _build(run):
    run.notes["scale"] = 1024.0


def _scale(run, loss):
    if run.step and run.step % 30 == 0:
        run.notes["scale"] *= 2 if run.step % 60 else 0.5
    run.declared["loss_scale"] = run.notes["scale"]
    return loss * run.notes["scale"]


def _unscale(run):
    for p in run.plain.parameters():
        p.grad /= run.notes["scale"]


CASE = Case("B5", "a loss scale that moves", Expect(silent=True), build=_build, loss=_scale, before_update=_unscale)
