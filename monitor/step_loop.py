"""The training process's side of a step: collect, judge what must be judged at once, hand over, go on."""

import logging
from collections.abc import Callable
from typing import Any, Final

from trainsentry.anomaly.first_sight import FirstSight
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import FOUND_INF, SKIPPED, SeriesTable
from trainsentry.monitor.config import MonitorConfig
from trainsentry.monitor.errors import OverflowLimitReached
from trainsentry.monitor.hand_over import HandOver
from trainsentry.monitor.overhead import Overhead
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.scalar_log import ScalarLog
from trainsentry.monitor.schedule import Schedule
from trainsentry.monitor.step_end import StepEnd
from trainsentry.monitor.targeted_dump import PART as DUMP
from trainsentry.monitor.trainer_counters import TrainerCounters
from trainsentry.monitor.triggers import Triggers

logger = logging.getLogger("trainsentry")

PART: Final = "step boundary"


class StepLoop:
    """Follows the steps of the watched optimizers, and does at each boundary what has to be done there.

    It is the `StepListener` of the collectors. `watch` is the framework's watched model.
    """

    def __init__(
        self,
        config: MonitorConfig,
        watch: Any,
        table: SeriesTable,
        link: RecorderLink,
        guard: Guard,
        triggers: Triggers,
        schedule: Schedule,
        overhead: Overhead,
        *,
        rank: int,
        start_step: int,
        same_step: bool,
    ) -> None:
        self.watch = watch
        self.table = table
        self.link = link
        self.guard = guard
        self.triggers = triggers
        self.schedule = schedule
        self.overhead = overhead
        self.rank = rank
        self.step = start_step
        self.same_step = same_step
        self.first_sight = FirstSight(table)
        self.overflow = self.first_sight.overflow
        self.overflow_nums = config.overflow_check.overflow_nums if config.overflow_check else -1
        self.records = HandOver(link, table, rank, keep_bytes=config.ring_size)
        self.steps = 0
        self.skipped_steps = 0
        self.grad_acc_steps: int | None = None
        settings = config.on_incident.dump if config.on_incident else None
        self._urgent_distance = settings.cooldown_steps if settings else 100
        self._last_urgent: int | None = None
        self._order = 0
        self._skipped = False
        self._judged = False
        self._seen: tuple[int, Any] = (0, None)
        self._end = StepEnd(())
        self._plan: frozenset[str] = frozenset()
        self.scalars = ScalarLog(watch, guard)
        self._scale_noted = False
        self.counters = TrainerCounters(self)
        self._closure = False
        self._shut = False

    def go_to(self, step: int) -> None:
        """Go on from another step, as after a checkpoint was loaded: nothing that was agreed on before holds."""
        self.guard.run(PART, lambda: self.publish(wait=True))
        self.watch.rows.drop()
        self._end = StepEnd(id(o) for o in self.watch.optimizers)
        self._begin_step()
        self.step = step
        self._last_urgent = None
        self.overflow.go_back()
        self.triggers.go_back()
        self.guard.run(PART, self._open)

    # ------------------------------------------------------------------ what the collectors tell

    def begin(self) -> None:
        """Start (anew) after models were added: wait for all optimizers, open the current step."""
        self._end = StepEnd(id(o) for o in self.watch.optimizers)
        self.link.send(messages.SAMPLING, line=self.overhead.sampling(self.step))
        self._run(self._open)

    def before_optimizer(self, optimizer: Any, *, has_closure: bool) -> None:
        """Collect what the update works with; judge it before the update where `same_step` asks for that."""
        self._run(self._before, optimizer, has_closure)

    def after_optimizer(self, optimizer: Any) -> None:
        """Collect what the update did; end the step with the last optimizer."""
        self._run(self._after, optimizer)

    def scaler_entered(self, scaler: Any, optimizer: Any) -> None:
        """Take the loss scale along, once a step."""
        self._run(self._note_scale, scaler)

    def scaler_skipped(self, scaler: Any, optimizer: Any) -> None:
        """Record a step that the loss scaler skipped."""
        self._run(self._skip, optimizer)

    def boundary(self) -> None:
        """End a step that has no optimizer."""
        self._run(self._without_optimizer)

    def log(self, scalars: dict[str, Any]) -> None:
        """Take scalars; the second value of a name within a step belongs to the second micro-step."""
        self.guard.run("log", self.scalars.take, scalars)

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        """Run a part of the boundary; when it fails, nothing of the monitor stays attached to the model."""
        self.guard.run(PART, function, *args)
        if PART in self.guard.disabled and not self._shut and self.guard.in_training_process:
            self._shut = True
            self.guard.run("close", self.watch.close)

    # ------------------------------------------------------------------ a step

    def _before(self, optimizer: Any, has_closure: bool) -> None:
        found_inf = getattr(optimizer, FOUND_INF, None)
        if found_inf is not None and self.schedule.plan(self.step):
            self.watch.log(FOUND_INF, found_inf, 0)
        self._closure = has_closure
        self.watch.before_update(optimizer, gradients_ready=not has_closure)
        self._dump_before_update()
        if not has_closure:
            self._judge_now()

    def _after(self, optimizer: Any) -> None:
        self.watch.after_update(optimizer, gradients_ready=self._closure)
        if self._end.stepped(id(optimizer)):
            self._end_step()

    def _skip(self, optimizer: Any) -> None:
        if not self._skipped and self.schedule.plan(self.step):
            self.watch.log(SKIPPED, 1.0, 0)
        self._skipped = True
        self.watch.skipped(optimizer)
        self._judge_now()
        if self._end.stepped(id(optimizer)):
            self._end_step()

    def _without_optimizer(self) -> None:
        self.watch.without_optimizer()
        self._dump_before_update()
        self._judge_now()
        self._end_step()

    def _dump_before_update(self) -> None:
        """Complete the step's dump, if there is one.

        Raises:
            TrainingStopped: when a stop has waited for the dump.

        """
        self._dump(lambda dump: dump.before_update(self.step))
        self.triggers.dump_taken(self.step)
        if self.triggers.stop is not None and self.triggers.stop_before_update:
            self._hand_over_now()
            self.triggers.raise_stop()

    def _note_scale(self, scaler: Any) -> None:
        if not self._scale_noted and self.schedule.plan(self.step) and scaler.is_enabled():
            self._scale_noted = True
            self.watch.note_loss_scale(scaler)

    def _judge_now(self) -> None:
        """With `same_step`, look at what was collected before the update makes use of it.

        Raises:
            OverflowLimitReached: at the `overflow_nums`-th step with an overflow, before its update.

        """
        if not self.same_step or not len(self.watch.rows):
            return
        record = self.records.build(self.watch.rows.peek(), self.step, self._order, skipped=self._skipped)
        self._judged = True
        if not self.first_sight.is_wrong(record):
            self._seen = (len(self.watch.rows), record)
            return
        self._examine()
        self._check_limit()
        if self.triggers.stop is not None:
            self._hand_over_now()
            self.triggers.raise_stop()

    def _examine(self) -> None:
        """Read weights and state out of turn, have the step ranked at once, and act before the update."""
        if self._last_urgent is not None and self.step - self._last_urgent < self._urgent_distance:
            return
        self._last_urgent = self.step
        self.watch.examine()
        self._hand_over_now(examined=True)
        heard = self.link.wait_for_verdict(self.step)
        self.triggers.hear(heard)
        self.triggers.grant(self.step + 1, under_way=self.step)

    def _hand_over_now(self, *, examined: bool = False) -> None:
        """Hand over the part of the step that has been collected so far."""
        self._seen = (0, None)
        if len(self.watch.rows):
            rows = self.watch.take()
            record = self.records.build(rows, self.step, self._order, skipped=self._skipped, examined=examined)
            self._order += len(record)
            self.skipped_steps += record.skipped
            self.records.hand_over(record)

    def _end_step(self) -> None:
        """Close the step's rows, hand over what has arrived, grant requests, and open the next step.

        Raises:
            TrainingStopped: when a stop was asked for.

        """
        rows, record = self._seen
        if rows and rows == len(self.watch.rows):  # the update has added nothing to what was judged before it
            self.watch.rows.drop()
            self.records.await_record(record)
        elif len(self.watch.rows):
            pending = self.watch.take()
            self.records.await_rows(pending, self.step, self._order, skipped=self._skipped, judged=self._judged)
        self._check_micro_steps()
        self._dump(lambda dump: dump.end_step())
        self.publish()
        changed = self.overhead.end_step(self.step, self._plan)
        self.step += 1
        self.steps += 1
        self._begin_step()
        self.triggers.hear(self.link.poll())
        self.triggers.grant(self.step)
        if changed:
            self.link.send(messages.SAMPLING, line=self.overhead.sampling(self.step))
        self.counters.tell_now_and_then()
        self._open()
        self._dump(lambda dump: dump.open_step(self.step))
        self.triggers.raise_stop()

    def _begin_step(self) -> None:
        self._order, self._skipped, self._judged, self._scale_noted = 0, False, False, False
        self._seen = (0, None)
        self.scalars.end_step()

    def _open(self) -> None:
        self._plan = self.schedule.plan(self.step)
        self.watch.open_step(self._plan)

    def _check_micro_steps(self) -> None:
        """Say once when the accumulation that was seen is not the one that `watch` was told."""
        seen = self.watch.micro_steps
        if self.grad_acc_steps is not None and seen and seen != self.grad_acc_steps and not self._skipped:
            logger.warning(
                "trainsentry: watch was told grad_acc_steps=%d, but step %d had %d forward passes",
                self.grad_acc_steps,
                self.step,
                seen,
            )
            self.grad_acc_steps = None

    def publish(self, *, wait: bool = False) -> None:
        """Hand over the records whose rows have arrived; with `wait`, all of them."""
        for record, judged in self.records.arrived(wait=wait):
            if not judged and self.overflow.judge(record) is not None:
                self._check_limit()
            self.skipped_steps += record.skipped
            self.records.hand_over(record)

    def _check_limit(self) -> None:
        if self.overflow_nums < 0 or self.overflow.count < self.overflow_nums or self.triggers.stop is not None:
            return
        incident = max(self.triggers.incidents.values(), key=lambda i: i.id, default=None)
        reason = f"overflow in {self.overflow.count} steps, overflow_nums is {self.overflow_nums}"
        self.overflow_nums = -1
        self.triggers.stop = OverflowLimitReached(self.step, reason, incident)
        if incident is not None:
            self.triggers.note_action(incident.id, f"stop at step {self.step} by overflow_nums")

    def _dump(self, action: Callable[[Any], None]) -> None:
        if self.triggers.dump is not None:
            self.guard.run(DUMP, action, self.triggers.dump)
            if DUMP in self.guard.disabled:
                self.triggers.dump.abandon()
                self.triggers.dump = None
