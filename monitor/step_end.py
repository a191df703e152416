"""Decides when a step with several optimizers ends, and checks its number of micro-steps."""

import logging
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final

logger = logging.getLogger("trainsentry")

PATIENCE: Final = 100
"""After this many steps of one optimizer, a step ends without the optimizers that have not stepped."""


class StepEnd:
    """Ends a step when the last of the optimizers has stepped.

    An optimizer may step several times within a step (the critic of a GAN). An optimizer that does not step for
    `PATIENCE` steps of another one (it trains in another phase) does not count until it steps again.

    >>> end = StepEnd(["generator", "critic"])
    >>> end.stepped("critic"), end.stepped("critic"), end.stepped("generator")
    (False, False, True)
    """

    def __init__(self, optimizers: Iterable[Hashable]) -> None:
        self.expected = set(optimizers)
        self._counts: Counter[Hashable] = Counter()

    def stepped(self, optimizer: Hashable) -> bool:
        """Note that an optimizer has stepped or was skipped; return whether the step has ended."""
        self.expected.add(optimizer)
        self._counts[optimizer] += 1
        if self._counts[optimizer] >= PATIENCE:
            self.expected = set(self._counts)
        if self.expected <= set(self._counts):
            self._counts.clear()
            return True
        return False


def checked_micro_steps(expected: int | None, seen: int, step: int) -> int | None:
    """Warn if a step had another number of forward passes than `expected`; return the number to expect from now on."""
    if expected is None or not seen or seen == expected:
        return expected
    logger.warning("trainsentry: watch got grad_acc_steps=%d, but step %d had %d forward passes", expected, step, seen)
    return None
