"""Numbers that all ranks share: what each proposes, and the greatest of it."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainsentry.collectors.torch.meeting import Meeting


class Agreement:
    """Finds the greatest of what the ranks propose, while their steps go on.

    Every rank takes part, watched or not. Alone (`meeting` is None) a rank agrees with itself.
    """

    def __init__(self, meeting: Meeting | None, max_wait: float) -> None:
        self._max_wait = timedelta(seconds=max_wait)
        self._meeting = meeting
        self._values: torch.Tensor | None = None
        self._work: Any = None

    def propose(self, values: Sequence[float]) -> None:
        """Begin to agree on values, as many on every rank."""
        self._values = torch.tensor(values, dtype=torch.float64)
        if self._meeting is not None:
            self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, self._meeting.group, async_op=True)

    def result(self) -> list[float] | None:
        """Return the greatest of each value, waiting for the other ranks; None when nothing was proposed.

        Raises:
            RuntimeError: when a rank has not proposed anything within `max_wait` seconds.

        """
        if self._values is None:
            return None
        if self._work is not None:
            self._work.wait(self._max_wait)
        values, self._values, self._work = self._values, None, None
        agreed: list[float] = values.tolist()
        return agreed
