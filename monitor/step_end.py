"""When a step ends: with several optimizers in turn, and with micro-steps."""

import logging
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final

logger = logging.getLogger("trainsentry")

PATIENCE: Final = 100
"""Steps that one optimizer may take while another takes none, before the others are no longer waited for."""


class StepEnd:
    """A step ends when the last of the optimizers has stepped.

    An optimizer may step several times before that (the critic of a GAN). One that has not stepped for long
    (it trains in another phase) is left out until it steps again.

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


def checked_micro_steps(told: int | None, seen: int, step: int) -> int | None:
    """Say when a step had another number of forward passes than was told; return what is still to be checked."""
    if told is None or not seen or seen == told:
        return told
    logger.warning("trainsentry: watch was told grad_acc_steps=%d, but step %d had %d forward passes", told, step, seen)
    return None
