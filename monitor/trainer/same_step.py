"""Looks at a step before its update makes use of it, and acts in time."""

from typing import TYPE_CHECKING, Any

from trainsentry.monitor.config.schema import MonitorConfig

if TYPE_CHECKING:
    from trainsentry.monitor.trainer.step_loop import StepLoop


class SameStep:
    """With `same_step` a step is judged, dumped and stopped before its update.

    `seen` is the record that was judged, with how many rows it had, so that it need not be made a second time;
    `judged` says that the overflow rule has seen the step.
    """

    def __init__(self, loop: "StepLoop", config: MonitorConfig) -> None:
        self.loop = loop
        self.seen: tuple[int, Any] = (0, None)
        self.judged = False
        settings = config.on_incident.dump if config.on_incident else None
        self._distance = settings.cooldown_steps if settings else 100
        self._last: int | None = None

    def begin_step(self) -> None:
        """Forget what was seen of the last step."""
        self.seen, self.judged = (0, None), False

    def go_back(self) -> None:
        """Go on from another step: the next examination need not keep a distance to the last."""
        self._last = None

    def judge(self) -> None:
        """With `same_step`, look at what was collected before the update makes use of it.

        Raises:
            OverflowLimitReached: at the `overflow_nums`-th step with an overflow, before its update.

        """
        loop = self.loop
        if not loop.same_step or not len(loop.watch.rows):
            return
        record = loop.records.build(loop.watch.rows.peek(), loop.step, loop.order, skipped=loop.skipped)
        self.judged = True
        if not loop.first_sight.is_wrong(record):
            self.seen = (len(loop.watch.rows), record)
            return
        self._examine()
        loop.limit.check(loop.step)
        if loop.triggers.stop is not None:
            self.stop_before_update()

    def stop_before_update(self) -> None:
        """Raise the stop that was asked for; several ranks agree on it at the boundary.

        Raises:
            TrainingStopped: the stop.

        """
        loop = self.loop
        if loop.common is None:
            self._hand_over()
            loop.triggers.raise_stop()

    def _examine(self) -> None:
        """Read weights and state out of turn, have the step ranked at once, and act before the update."""
        loop = self.loop
        if self._last is not None and loop.step - self._last < self._distance:
            return
        self._last = loop.step
        loop.watch.examine()
        self._hand_over(examined=True)
        heard = loop.link.wait_for_verdict(loop.step)
        loop.triggers.hear(heard)
        if loop.common is None:
            loop.triggers.grant(loop.step + 1, under_way=loop.step)
        else:
            loop.triggers.dump_now(loop.step)

    def _hand_over(self, *, examined: bool = False) -> None:
        """Hand over the part of the step that has been collected so far."""
        loop = self.loop
        self.seen = (0, None)
        if len(loop.watch.rows):
            rows = loop.watch.take()
            record = loop.records.build(rows, loop.step, loop.order, skipped=loop.skipped, examined=examined)
            loop.order += len(record)
            loop.skipped_steps += record.skipped
            loop.records.hand_over(record)
