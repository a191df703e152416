"""What the training process counts, for `status.json`."""

import time
from typing import TYPE_CHECKING, Any, Final

from trainsentry.monitor.recorder import messages

if TYPE_CHECKING:
    from trainsentry.monitor.trainer.step_loop import StepLoop

COUNTERS_EVERY_SECONDS: Final = 1.0
"""How often the trainer tells the recorder what it counted, for `status.json`."""


class TrainerCounters:
    """Tells the recorder what the trainer counted."""

    def __init__(self, loop: "StepLoop") -> None:
        self.loop = loop
        self._told_at = 0.0
        self._graph_told = -1

    def tell_now_and_then(self) -> None:
        """Tell, unless it was done a moment ago."""
        now = time.monotonic()
        if now - self._told_at >= COUNTERS_EVERY_SECONDS:
            self._told_at = now
            self.tell()

    def tell(self) -> None:
        """Send counters, and the graph when more of it is known."""
        loop, flow = self.loop, self.loop.watch.flow
        loop.link.send(messages.COUNTERS, counters=counters_of(loop))
        if flow.passes and self._graph_told != len(flow.order):
            self._graph_told = len(flow.order)
            loop.link.send(messages.GRAPH, graph=loop.watch.graph())


def counters_of(loop: "StepLoop") -> dict[str, Any]:
    """Return failures, skipped steps, what was left out, the monitor's own cost, and what the coming step samples."""
    failures = {part: {"count": f.count, "last": f.last} for part, f in loop.guard.failures.items()}
    return {
        "failures": failures,
        "dropped_records": loop.link.dropped,
        "skipped_steps": loop.skipped_steps,
        "calls_left_out": loop.watch.left_out,
        "recorder": {"mode": loop.link.mode, "lost": loop.link.lost_recorders},
        "cost": loop.overhead.summary(),
        "sampling": sorted(loop.schedule.plan(loop.step)),
        "every": loop.schedule.stretched,
    }
