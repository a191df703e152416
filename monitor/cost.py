"""What the monitor costs: the time it takes in the training process, beside the time the steps take without it."""

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

from trainsentry.collectors.guard import Guard

RECENT_STEPS: Final = 50
"""Steps of the recent share: a few cycles of the default sampling, so that it is neither jumpy nor stale."""


class Cost:
    """Measures each step: wall time, host time in hooks and at boundaries, and what part of it each collector took.

    Shares are of the time the training takes by itself: added ÷ (wall − added).
    """

    def __init__(self, guard: Guard, clock: Callable[[], float] = time.perf_counter) -> None:
        self.guard = guard
        self.steps = 0
        self.wall = 0.0
        self.added = 0.0
        self._clock = clock
        self._last: float | None = None
        self._spent = 0.0
        self._by_part: Counter[str] = Counter()
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)

    def end_step(self) -> "tuple[float, float, dict[str, float]] | None":
        """Close a step; return its seconds without the monitor, those added, and those of each part.

        The first step begins at an unknown time and gives None.
        """
        now, spent = self._clock(), self.guard.spent_ns_so_far() / 1e9
        by_part = {part: ns / 1e9 for part, ns in self.guard.spent_by.items()}
        last, self._last = self._last, now
        added, self._spent = spent - self._spent, spent
        parts = {part: seconds - self._by_part[part] for part, seconds in by_part.items()}
        self._by_part.update(parts)
        if last is None:
            return None
        self.steps += 1
        self.wall += now - last
        self.added += added
        bare = max(now - last - added, 1e-9)
        self._recent.append((bare, added))
        return bare, added, parts

    @property
    def share(self) -> float:
        """Added time of the whole run as a share of the training's own."""
        return self.added / max(self.wall - self.added, 1e-9)

    @property
    def recent_share(self) -> float:
        """The same over the last steps; a step that took long (an evaluation, a checkpoint) counts as a usual one."""
        if not self._recent:
            return 0.0
        usual = statistics.median(bare for bare, _ in self._recent)
        return statistics.fmean(added for _, added in self._recent) / usual

    def summary(self) -> dict[str, Any]:
        """Return what `status.json` says about the cost. Seconds are of host time in the training process."""
        return {
            "host_seconds": self.added,
            "seconds_a_step": self.added / max(self.steps, 1),
            "share": self.share,
            "recent_share": self.recent_share,
        }
