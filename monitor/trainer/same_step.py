"""Judges a step before its update, so that its dump and its stop come at that very step."""

from typing import TYPE_CHECKING, Final

from trainsentry.anomaly.pre_update_check import Suspected
from trainsentry.collectors.record import StepRecord
from trainsentry.monitor.config.schema import MonitorConfig

if TYPE_CHECKING:
    from trainsentry.monitor.trainer.step_loop import StepLoop

EXAMINATION_DISTANCE: Final = 100
"""Fewest steps between two examinations if no dump is configured: the default of a dump's `cooldown_steps`."""


class SameStep:
    """Judges, dumps and stops a step before its update, if `same_step` is on."""

    def __init__(self, loop: "StepLoop", config: MonitorConfig) -> None:
        self.loop = loop
        settings = config.on_incident.dump if config.on_incident else None
        self._distance = settings.cooldown_steps if settings else EXAMINATION_DISTANCE
        self._last: dict[Suspected, int] = {}

    def go_back(self) -> None:
        """Continue from another step; the next examination may come at once."""
        self._last = {}

    def judge(self, record: StepRecord) -> None:
        """Check the open step's record before the update uses its values; examine the step if one is wrong.

        Raises:
            TrainingStopped: on a single rank, when an incident requests a stop.
            OverflowLimitReached: on a single rank, at the `overflow_nums`-th step with an overflow.

        """
        loop = self.loop
        why = loop.pre_update_check.suspect(record)
        if why is None:
            return
        self._examine(why)
        loop.limit.check(loop.step)
        if loop.triggers.stop is not None:
            self.stop_before_update()

    def _examine(self, why: Suspected) -> None:
        """Read weights and state off schedule, wait for the recorder's verdict, and act on it before the update.

        What is far out is examined once in a while, and does not keep what is certain from being examined.
        """
        loop = self.loop
        before = [self._last.get(kind) for kind in Suspected if kind is why or why is Suspected.FAR_OUT]
        if any(last is not None and loop.step - last < self._distance for last in before):
            return
        self._last[why] = loop.step
        loop.watch.examine()
        self._send_rows(examined=True)
        loop.triggers.receive(loop.link.wait_for_verdict(loop.step))
        loop.triggers.act_before_update(loop.step)

    def stop_before_update(self) -> None:
        """Raise the requested stop on a single rank; several ranks, and a trainer's callback, take it at the boundary.

        Raises:
            TrainingStopped: on a single rank, if a stop was requested.

        """
        if self.loop.stops_at_boundary or not self.loop.consensus.is_single_rank:
            return
        self._send_rows()
        stop = self.loop.triggers.take_stop()
        if stop is not None:
            self.loop.stopped = stop
            raise stop

    def _send_rows(self, *, examined: bool = False) -> None:
        """Send the rows collected so far as a record of their own."""
        loop = self.loop
        if len(loop.watch.rows):
            part = {"skipped": loop.skipped, "examined": examined}
            record = loop.outbox.send_part(loop.watch, loop.step, loop.order, **part)
            loop.order += len(record)
            loop.count_skipped(record)
