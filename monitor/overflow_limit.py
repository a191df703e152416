"""Stops training at the `overflow_nums`-th step with an overflow."""

from trainsentry.anomaly.overflow import OverflowRule
from trainsentry.monitor.errors import OverflowLimitReached
from trainsentry.monitor.triggers import Triggers


class OverflowLimit:
    """Asks for a stop once, when as many steps had an overflow as are allowed; never with -1."""

    def __init__(self, overflow: OverflowRule, nums: int, triggers: Triggers) -> None:
        self.overflow = overflow
        self.nums = nums
        self.triggers = triggers

    def check(self, step: int) -> None:
        """Ask for a stop at `step` if the limit is reached."""
        if self.nums < 0 or self.overflow.count < self.nums or self.triggers.stop is not None:
            return
        incident = max(self.triggers.incidents.values(), key=lambda i: i.id, default=None)
        reason = f"overflow in {self.overflow.count} steps, overflow_nums is {self.nums}"
        self.nums = -1
        self.triggers.stop = OverflowLimitReached(step, reason, incident)
        if incident is not None:
            self.triggers.note_action(incident.id, f"stop at step {step} by overflow_nums")
