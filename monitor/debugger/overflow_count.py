"""Counts overflowing calls of all ranks, and stops training on every one of them at the limit."""

import logging
from typing import Any

from trainsentry.monitor.errors import OverflowLimitReached

logger = logging.getLogger("trainsentry")


class OverflowCount:
    """Calls of steps that a loss scaler left out are counted apart, in `skipped_steps`: it has dealt with them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.calls = 0
        self.skipped_steps = 0
        self.first: str | None = None
        self._rendezvous: Any = None
        self._max_reduce: Any = None
        self._alone = False

    def end_step(self, step: int, found: tuple[int, str | None, bool], framework: Any) -> None:
        """Add a step's calls.

        Raises:
            OverflowLimitReached: on every rank at the same step, when one of them has reached the limit.

        """
        calls, first, unscaled = found
        if unscaled:
            self.skipped_steps += 1
            logger.info("trainsentry: step %d: the loss scaler left it out; %d overflowing calls", step, calls)
        else:
            self.calls += calls
            self.first = self.first or first
        if self.limit < 0:
            return
        most = self._greatest(float(self.calls), framework)
        if most >= self.limit:
            where = f"; the first on this rank: {self.first}" if self.first else ""
            count = f"{int(most)} overflowing calls on one rank, overflow_nums is {self.limit}"
            raise OverflowLimitReached(step, f"{count}{where}")

    def close(self) -> None:
        """Leave the other ranks."""
        if self._rendezvous is not None:
            self._rendezvous.close(broken=self._alone)
            self._rendezvous = None

    def _greatest(self, mine: float, framework: Any) -> float:
        """Return the most calls of any rank; this rank's own, from when on the others have not come."""
        if self._alone:
            return mine
        try:
            if self._max_reduce is None:
                self._rendezvous = framework.meet()
                self._max_reduce = framework.max_reduce(self._rendezvous)
            self._max_reduce.propose([mine])
            agreed = self._max_reduce.result()
        except RuntimeError as error:
            self._alone = True
            logger.warning("trainsentry: overflow_check: each rank stops for itself: %s", error)
            return mine
        return float(agreed[0]) if agreed else mine
