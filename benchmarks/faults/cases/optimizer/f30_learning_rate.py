"""The learning rate jumps thirtyfold."""

from case import Case, Expect


def _harm(run):
    if run.at_fault:
        run.schedule.base_lrs = [30 * x for x in run.schedule.base_lrs]
        for group in run.optimizer.param_groups:
            group["lr"] *= 30
        run.schedule._last_lr = [group["lr"] for group in run.optimizer.param_groups]


CASE = Case(
    "F30",
    "learning rate times 30",
    Expect(("optimizer", "update"), ("update_size", "option_change")),
    before_step=_harm,
)
