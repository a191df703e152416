"""Decides when a step with several optimizers ends, checks its number of micro-steps, and logs how long it took."""

import logging
import time
from collections import Counter
from collections.abc import Hashable, Iterable
from collections.abc import Set as AbstractSet
from typing import Final

from trainsentry.collectors.backend import ModelWatch
from trainsentry.collectors.series import COMMUNICATION_ORDER, COMMUNICATION_SECONDS, OUTSIDE_SECONDS, STEP_SECONDS
from trainsentry.collectors.settings import COMMUNICATION

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

    def has_stepped(self, optimizer: Hashable) -> bool:
        """Whether an optimizer has stepped since the last step ended."""
        return optimizer in self._counts

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


class StepTimes:
    """Logs each step's times and the order of its collectives, with several ranks, so that these can be compared."""

    def __init__(self) -> None:
        self._began: float | None = None

    def note(self, watch: ModelWatch, plan: AbstractSet[str]) -> None:
        """Log the times of the step that ends now; `plan` is what it samples.

        Its first pass is later than its beginning by what the rank does outside of the model. Waiting for collectives
        is measured in the steps that sample them.
        """
        began, self._began = self._began, time.perf_counter()
        order = watch.take_call_order()
        if order is not None and plan:
            watch.log(COMMUNICATION_ORDER, float(order), 0)
        waited, first = watch.seconds_waited, watch.first_pass_at
        if waited is None or began is None or not plan:
            return
        watch.log(STEP_SECONDS, self._began - began, 0)
        if COMMUNICATION in plan:
            watch.log(COMMUNICATION_SECONDS, waited, 0)
        if first is not None:
            watch.log(OUTSIDE_SECONDS, first - began, 0)
