"""What the training process counts, for `status.json`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainsentry.monitor.step_loop import StepLoop


def counters_of(loop: "StepLoop") -> dict[str, Any]:
    """Return failures, skipped steps, what was left out, the monitor's own cost, and what the coming step samples."""
    seconds = loop.guard.spent_ns / 1e9
    failures = {part: {"count": f.count, "last": f.last} for part, f in loop.guard.failures.items()}
    return {
        "failures": failures,
        "dropped_records": loop.link.dropped,
        "skipped_steps": loop.skipped_steps,
        "calls_left_out": loop.watch.left_out,
        "recorder": {"mode": loop.link.mode, "lost": loop.link.lost_recorders},
        "cost": {"host_seconds": seconds, "seconds_a_step": seconds / max(loop.steps, 1)},
        "sampling": sorted(loop.schedule.plan(loop.step)),
    }
