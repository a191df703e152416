"""The model is left in evaluation mode."""

from case import Case, Expect


def _harm(run):
    if run.at_fault:
        run.model.eval()


CASE = Case(
    "F33",
    "evaluation mode in training",
    Expect(("training",), ("mode_change",), hard=True, within=1),
    before_step=_harm,
)
