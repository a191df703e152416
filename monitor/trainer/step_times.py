"""With several ranks: how long a step took and what of it, and the order of its collectives."""

import time
from collections.abc import Set as AbstractSet

from trainsentry.collectors.backend import ModelWatch
from trainsentry.collectors.series import COMMUNICATION_ORDER, COMMUNICATION_SECONDS, OUTSIDE_SECONDS, STEP_SECONDS
from trainsentry.collectors.settings import COMMUNICATION


class StepTimes:
    """Logs each step's times, so that the ranks can be compared."""

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
