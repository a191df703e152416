"""Counts overflowing calls on each rank, and stops training on all ranks when one reaches the limit."""

import logging
from typing import Any

from trainsentry.exporters.short_text import counted
from trainsentry.monitor.errors import OverflowLimitReached

logger = logging.getLogger("trainsentry")


class OverflowCount:
    """The overflowing calls of this rank; steps that the loss scaler skipped count only in `skipped_steps`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.calls = 0
        self.skipped_steps = 0
        self.first: str | None = None
        self._rendezvous: Any = None
        self._max_reduce: Any = None
        self._alone = False

    def end_step(self, step: int, found: tuple[int, str | None, bool], framework: Any) -> None:
        """Add a step's calls, and stop on all ranks if one has reached the limit.

        Raises:
            OverflowLimitReached: on every rank at the same step, when one of them has reached the limit.

        """
        calls, first, unscaled = found
        if unscaled:
            self.skipped_steps += 1
            count = counted(calls, "overflowing call")
            logger.info("trainsentry: the loss scaler skipped step %d with %s", step, count)
        else:
            self.calls += calls
            self.first = self.first or first
        if self.limit < 0:
            return
        most = self._max_over_ranks(float(self.calls), framework)
        if most >= self.limit:
            raise self.reached(step, int(most), self.first)

    def reached(self, step: int, calls: int, first: str | None) -> OverflowLimitReached:
        """Return the exception that stops training."""
        where = f"; the first on this rank: {first}" if first else ""
        count = f"{counted(calls, 'overflowing call')} on one rank, overflow_nums is {self.limit}"
        return OverflowLimitReached(step, f"{count}{where}")

    def close(self) -> None:
        """Leave the rendezvous with the other ranks."""
        if self._rendezvous is not None:
            self._rendezvous.close(broken=self._alone)
            self._rendezvous = None

    def _max_over_ranks(self, local: float, framework: Any) -> float:
        """Return the maximum over all ranks; once they cannot be reached, this rank's own count."""
        if self._alone:
            return local
        try:
            if self._max_reduce is None:
                self._rendezvous = framework.meet()
                self._max_reduce = framework.max_reduce(self._rendezvous)
            self._max_reduce.propose([local])
            agreed = self._max_reduce.result()
        except (RuntimeError, TimeoutError) as error:
            self._alone = True
            logger.warning("trainsentry: overflow_check: this rank counts alone and stops alone: %s", error)
            return local
        return float(agreed[0]) if agreed else local
