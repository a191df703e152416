"""Measures the monitor's cost at each step boundary, and keeps it within the budget, if there is one."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.settings import COMMUNICATION, PARTS
from trainsentry.monitor.schedule import Schedule
from trainsentry.monitor.trainer.budget import Budget

RECENT_STEPS: Final = 50
"""Steps in the recent share: five cycles of the default sampling, neither noisy nor out of date."""


class Cost:
    """Measures each step's wall time, and the host time that hooks and boundaries add to it, by part.

    Shares relate to the training's own time: added ÷ (wall − added).
    """

    def __init__(self, guard: Guard, clock: Callable[[], float] = time.perf_counter) -> None:
        self.guard = guard
        self.steps = 0
        self.wall = 0.0
        self.added = 0.0
        self._clock = clock
        self._last: float | None = None
        self._spent = 0.0
        self._by_part: dict[str, int] = {}
        self._of_first_step: dict[str, int] = {}
        self._until_now: dict[str, int] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)

    def end_step(self) -> "tuple[float, float] | None":
        """End a step; return its seconds without the monitor, and the added seconds.

        Returns None for the first step, whose start is unknown.
        """
        now, spent = self._clock(), self.guard.spent_ns_so_far() / 1e9
        last, self._last = self._last, now
        added, self._spent = spent - self._spent, spent
        if last is None:
            self._of_first_step = self._until_now = dict(self.guard.spent_by)
            return None
        self._until_now = dict(self.guard.spent_by)
        self.steps += 1
        self.wall += now - last
        self.added += added
        bare = max(now - last - added, 1e-9)
        self._recent.append((bare, added))
        return bare, added

    def by_part(self) -> dict[str, float]:
        """Return the seconds that each part has taken since the last call."""
        before, self._by_part = self._by_part, dict(self.guard.spent_by)
        return {part: (ns - before.get(part, 0)) / 1e9 for part, ns in self._by_part.items()}

    def shares_of(self, parts: Iterable[str]) -> dict[str, float]:
        """Return the seconds of some parts of the added time, and of everything else, without the first step."""
        spent, first = self._until_now, self._of_first_step
        seconds = {part: (spent[part] - first.get(part, 0)) / 1e9 for part in parts if part in spent}
        return {**seconds, "everything else": self.added - sum(seconds.values())}

    @property
    def share(self) -> float:
        """Added time of the whole run as a share of the training's own time."""
        return self.added / max(self.wall - self.added, 1e-9)

    @property
    def recent_share(self) -> float:
        """The same over the last steps, at their median time: an evaluation or a checkpoint does not lower it."""
        if not self._recent:
            return 0.0
        usual = statistics.median(bare for bare, _ in self._recent)
        return statistics.fmean(added for _, added in self._recent) / usual

    @property
    def step_seconds(self) -> float | None:
        """Median wall time of the last steps, with the monitor; None before the second step."""
        return statistics.median(bare + added for bare, added in self._recent) if self._recent else None

    def summary(self) -> dict[str, Any]:
        """Return the cost for `status.json`, in seconds of host time in the training process."""
        return {
            "step_seconds": self.step_seconds,
            "host_seconds": self.added,
            "seconds_a_step": self.added / max(self.steps, 1),
            "share": self.share,
            "recent_share": self.recent_share,
        }


PART: Final = "overhead budget"

DECIDE_EVERY: Final = 5
"""Steps between two decisions; the step number determines them, so that all ranks decide at the same step."""


class Overhead:
    """Measures steps and stretches the schedule's intervals; several ranks decide by their maximum costs."""

    def __init__(self, guard: Guard, schedule: Schedule, share: float | None) -> None:
        self.guard = guard
        self.schedule = schedule
        self.cost = Cost(guard)
        self.budget = Budget(share, schedule.every) if share is not None else None

    def end_step(self, plan: frozenset[str]) -> None:
        """End a step in which the parts of `plan` were collected."""
        measured = self.cost.end_step()
        if self.budget is not None:
            parts = self.cost.by_part()
            if measured is not None:
                self.budget.note(plan, *measured, parts)

    def costs(self, step: int) -> tuple[float, ...]:
        """Return the measured seconds if all ranks decide at the end of `step`; the ranks agree on the maximum of each.

        The first number is minus the step's own seconds, so that its maximum belongs to the fastest rank.
        """
        if self.budget is None or step % DECIDE_EVERY:
            return ()
        bare, *costs = self.budget.measured()
        return (-bare, *costs)

    def decide(self, costs: Sequence[float]) -> bool:
        """Set the intervals by the costs that the ranks agreed on; return whether they change from the next step on."""
        if self.budget is None or not costs or not math.isfinite(costs[0]):
            return False
        if not self.guard.run(PART, self.budget.decide, [-costs[0], *costs[1:]]):
            return False
        self.schedule.stretch.update(self.budget.stretch)
        return True

    def adopt(self) -> None:
        """Follow the schedule's parts, which have changed; what they cost is measured anew."""
        if self.budget is not None:
            self.budget = Budget(self.budget.share, self.schedule.every)
            self.schedule.stretch.update(self.budget.stretch)

    def sampling(self, step: int) -> dict[str, Any]:
        """Return the line of `sampling.jsonl` with the intervals from `step` on."""
        return {"step": step, "every": self.schedule.stretched, "recent_share": self.cost.recent_share}

    def summary(self) -> dict[str, Any]:
        """Return the overhead for `status.json`: seconds, shares, and the budget."""
        budget = self.budget.share if self.budget is not None else None
        seconds = self.cost.shares_of((*PARTS, COMMUNICATION))
        return {**self.cost.summary(), "seconds_by_part": seconds, "budget": budget}
