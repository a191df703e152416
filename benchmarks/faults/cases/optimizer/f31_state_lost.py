"""The optimizer's state is lost."""

from case import Case, Expect


def _harm(run):
    if run.at_fault:
        run.optimizer.state.clear()


CASE = Case(
    "F31",
    "optimizer state lost",
    Expect(("optimizer", "exp_avg", "exp_avg_sq", "momentum_buffer"), ("state_reset",), hard=True, within=1),
    before_step=_harm,
)
