"""The monitor's cost in a run: measured at each boundary, and kept inside the budget where there is one."""

import sys
from typing import Any, Final

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.settings import PARTS
from trainsentry.monitor.budget import Budget
from trainsentry.monitor.cost import Cost
from trainsentry.monitor.schedule import Schedule

PART: Final = "overhead budget"

PATIENCE_SECONDS: Final = 60.0
"""How long ranks wait for one that is late with its numbers (it saves a checkpoint, it compiles), once in a run."""

DECIDE_EVERY: Final = 5
"""Steps between two decisions: a function of the step's number, so that all ranks decide together."""


class Overhead:
    """Measures steps and stretches the schedule. `agreement` is the framework's; it makes the decision common."""

    def __init__(self, guard: Guard, schedule: Schedule, share: float | None, agreement: Any) -> None:
        self.guard = guard
        self.schedule = schedule
        self.cost = Cost(guard)
        self.budget = Budget(share, schedule.every) if share is not None else None
        self._agreement = agreement

    def end_step(self, step: int, plan: frozenset[str]) -> bool:
        """Close a step; return whether sampling changes from the next one on."""
        measured = self.cost.end_step()
        if self.budget is None or PART in self.guard.disabled:
            return False
        if measured is not None:
            self.budget.note(plan, *measured)
        return bool(self.guard.run(PART, self._decide, step))

    def _decide(self, step: int) -> bool:
        assert self.budget is not None
        if step % DECIDE_EVERY == 0:
            bare, *costs = self.budget.measured()
            self._agreement.propose([-bare, *costs])  # the greatest cost beside the shortest step
        if step % DECIDE_EVERY != 1:
            return False
        agreed = self._agreement.result()
        if agreed is None or not self.budget.decide([-agreed[0], *agreed[1:]]):
            return False
        self.schedule.stretch = self.budget.stretch
        return True

    def sampling(self, step: int) -> dict[str, Any]:
        """Return the line of `sampling.jsonl` that says how is sampled from `step` on."""
        return {"step": step, "every": self.schedule.stretched, "recent_share": self.cost.recent_share}

    def summary(self) -> dict[str, Any]:
        """Return what `status.json` says: seconds, shares, and the budget."""
        budget = self.budget.share if self.budget is not None else None
        seconds = {part: self.guard.spent_by[part] / 1e9 for part in PARTS if part in self.guard.spent_by}
        seconds["everything else"] = self.cost.added - sum(seconds.values())
        return {**self.cost.summary(), "seconds_by_part": seconds, "budget": budget}

    def tell_at_end(self, output_dir: str, incidents: int) -> None:
        """Say in one line, where people look as a run ends, what was watched and what it cost."""
        if self.cost.steps:
            sys.stderr.write(
                f"trainsentry: {self.cost.steps + 1} steps watched, {incidents} incidents; the monitor added "
                f"{1e3 * self.cost.added / self.cost.steps:.2f} ms a step, {self.cost.share:.2%} of the training's own "
                f"time. Records are in {output_dir}\n"
            )
