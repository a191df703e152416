"""Sends the counters of the training process to the recorder, for `status.json`."""

import time
from typing import TYPE_CHECKING, Any, Final

from trainsentry.monitor.recorder import messages

if TYPE_CHECKING:
    from trainsentry.monitor.trainer.step_loop import StepLoop

COUNTERS_EVERY_SECONDS: Final = 1.0
"""Seconds between two sets of counters: as often as the recorder writes `status.json`."""


class TrainerCounters:
    """Sends the recorder the trainer's counters, and the graph of modules."""

    def __init__(self, loop: "StepLoop") -> None:
        self.loop = loop
        self._sent_at = 0.0
        self._sent_nodes = -1

    def send_if_due(self) -> None:
        """Send, unless the last counters are less than a second old."""
        now = time.monotonic()
        if now - self._sent_at >= COUNTERS_EVERY_SECONDS:
            self._sent_at = now
            self.send()

    def send(self) -> None:
        """Send the counters, and the graph if it has grown."""
        loop, flow = self.loop, self.loop.watch.flow
        loop.link.send(messages.COUNTERS, counters=counters_of(loop))
        if flow.passes and self._sent_nodes != len(flow.order):
            self._sent_nodes = len(flow.order)
            loop.link.send(messages.GRAPH, graph=loop.watch.graph())


def counters_of(loop: "StepLoop") -> dict[str, Any]:
    """Return failures, skipped steps, dropped records, the monitor's own cost, the next step's samples, and the end."""
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
        **loop.ended,
    }
