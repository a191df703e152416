"""The training process's part of each step: collect, judge before the update, send records, open the next step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from trainsentry.anomaly.pre_update_check import PreUpdateCheck
from trainsentry.collectors.backend import ModelWatch
from trainsentry.collectors.guard import Guard, PassThrough
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import FOUND_INF, SKIPPED, SeriesTable
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.errors import TrainingStopped
from trainsentry.monitor.ranks.consensus import Consensus, Proposal
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.recorder.sinks.known_gaps import RING
from trainsentry.monitor.schedule import Schedule
from trainsentry.monitor.step_end import StepEnd, StepTimes, checked_micro_steps
from trainsentry.monitor.trainer.checkpoint_check import CheckpointCheck
from trainsentry.monitor.trainer.counters import TrainerCounters
from trainsentry.monitor.trainer.first_steps import FirstSteps
from trainsentry.monitor.trainer.live_control import LiveControl
from trainsentry.monitor.trainer.outbox import Outbox
from trainsentry.monitor.trainer.overhead import Overhead
from trainsentry.monitor.trainer.same_step import SameStep
from trainsentry.monitor.trainer.saved_state import detection_for
from trainsentry.monitor.trainer.scalar_log import ScalarLog
from trainsentry.monitor.trainer.targeted_dump import PART as DUMP
from trainsentry.monitor.trainer.triggers import OverflowLimit, Triggers

PART: Final = "step boundary"

StepCallback = Callable[[int], None]
"""Gets the number of a step that has ended, in the training thread."""


class StepLoop:
    """Does the monitor's work at each call of a watched optimizer and at each step boundary.

    It is the collectors' `StepListener`. `watch` is the framework's watched model. `owner` is the user's monitor: the
    optimizers' hooks keep the loop alive, and only the loop keeps the monitor alive.
    """

    owner: Any = None

    def __init__(
        self,
        config: MonitorConfig,
        watch: ModelWatch,
        table: SeriesTable,
        link: RecorderLink,
        guard: Guard,
        triggers: Triggers,
        schedule: Schedule,
        overhead: Overhead,
        consensus: Consensus,
        *,
        rank: int,
        start_step: int,
        same_step: bool,
        ranks: int = 1,
    ) -> None:
        self.watch = watch
        self.table = table
        self.link = link
        self.guard = guard
        self.triggers = triggers
        self.schedule = schedule
        self.overhead = overhead
        self.consensus = consensus
        self.rank = rank
        self.step = start_step
        self.same_step = same_step
        self.pre_update_check = PreUpdateCheck(table, lambda: watch.saturates)
        self.overflow = self.pre_update_check.overflow
        nums = config.overflow_check.overflow_nums if config.overflow_check else -1
        self.limit = OverflowLimit(self.overflow, nums, triggers)
        self.outbox = Outbox(link, table, rank, keep_bytes=config.ring_size)
        self.steps = 0
        self.skipped_steps = 0
        self._last_skipped = -1
        self.grad_acc_steps: int | None = None
        self._same_step = SameStep(self, config)
        self.order = 0
        self.skipped = False
        self.updated = False
        self.step_end = StepEnd(())
        self._plan: frozenset[str] = frozenset()
        self.scalars = ScalarLog(watch, guard)
        self._scale_noted = False
        self.stopped: TrainingStopped | None = None
        self.ended: dict[str, str] = {}
        self.counters = TrainerCounters(self)
        self.first_steps = FirstSteps(self)
        self._has_closure = False
        self._times = StepTimes()
        self._shut = False
        self._unfinished = False
        self.ends_at_callback = False
        self.stops_at_boundary = False
        self.step_callbacks: list[StepCallback] = []
        self.control = LiveControl(self, config, ranks)
        self.checkpoint = CheckpointCheck(None, None, guard, link)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that the user has loaded into the running monitor."""
        step = int(state["step"])
        self.go_to(step)
        self.link.send(messages.LOAD_STATE, state=detection_for(self.rank, state), step=step)
        self.checkpoint.load(state["fingerprints"])

    def go_to(self, step: int) -> None:
        """Continue from another step, as after loading a checkpoint; earlier decisions of the ranks are void."""
        self.guard.run(PART, lambda: self.publish(wait=True))
        self.watch.rows.drop()
        self.step_end = StepEnd(id(o) for o in self.watch.optimizers)
        self._begin_step()
        self.step = step
        self._same_step.go_back()
        self._last_skipped = -1
        self.overflow.go_back()
        self.triggers.go_back()
        self.guard.run(PART, self._open)

    # ------------------------------------------------------------------ called by the collectors

    def begin(self) -> None:
        """Start, or restart with added models: expect a step of every optimizer, open the current step."""
        self.step_end = StepEnd(id(o) for o in self.watch.optimizers)
        self.link.send(messages.SAMPLING, line=self.overhead.sampling(self.step))
        self._run(self._open)

    def before_optimizer(self, optimizer: Any, *, has_closure: bool) -> None:
        """Collect the update's inputs; with `same_step`, judge them before the update."""
        self._run(self._before, optimizer, has_closure)

    def gradients_arrived(self, optimizer: Any) -> None:
        """Collect and judge, before the update, the gradients that a closure has computed inside the step."""
        if self._has_closure:
            self._run(self._gradients_arrived, optimizer)

    def after_optimizer(self, optimizer: Any) -> None:
        """Collect the update's results; end the step after the last optimizer."""
        self._finish(self._after, optimizer)

    def after_part(self, optimizer: Any) -> None:
        """Collect the results of updating a part of an optimizer's parameters."""
        self._run(self.watch.after_part, optimizer)

    def scaler_entered(self, scaler: Any, optimizer: Any) -> None:
        """Record the loss scale, once per step."""
        self._run(self._note_scale, scaler)

    def scaler_skipped(self, scaler: Any, optimizer: Any) -> None:
        """Record a step that the loss scaler skipped."""
        self._finish(self._skip, optimizer)

    def update_refused(self, optimizer: Any) -> None:
        """Record a step whose optimizer refused to update, though it searches for no loss scale."""
        self._finish(self._refused, optimizer)

    def marked(self) -> None:
        """End a step that the program marks.

        Where all optimizers were taken over at their first step, marks end the steps from the first one on.
        """
        if self.watch.adopted_only and not self.ends_at_callback:
            self.ends_at_callback = True
            if self.steps and not self.updated:  # the optimizer's call has just ended this step
                return
        self.boundary()

    def boundary(self) -> None:
        """End a step that has no optimizer, or whose end a trainer's callback reports."""
        if self.guard.suspended:  # a graph is being captured: no step runs
            return
        if not self.updated:
            self._run(self._without_optimizer)
        self._end_step()

    def trained_without_step(self, passes: int) -> None:
        """Say that backward passes bring no step."""
        self.guard.run("first steps", self.first_steps.trained_without_step, passes)

    def log(self, scalars: dict[str, Any]) -> None:
        """Log scalars; the second value of a name within a step belongs to the second micro-step."""
        self.guard.run("log", self.scalars.take, scalars)

    def _finish(self, function: Callable[..., None], optimizer: Any) -> None:
        """Run the last part of an optimizer's step, and the boundary if it is the last optimizer's.

        A Ctrl-C may also arrive between the guarded parts. Then the boundary is missing, so that the rows of two steps
        stand together: the next boundary leaves them out.
        """
        if self._unfinished:
            self.guard.interrupted = self.guard.interrupted or "an interruption"
        self._unfinished = True
        try:
            self._run(function, optimizer)
            self._stepped(optimizer)
        except PassThrough:
            self._unfinished = False
            raise
        self._unfinished = False

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        """Run a part of the boundary; if it fails for good, detach the monitor from the model."""
        self.guard.run(PART, function, *args)
        if PART in self.guard.disabled and not self._shut and self.guard.in_training_process:
            self._shut = True
            # With several ranks this one still counts steps, so that all ranks decide and stop together.
            self.guard.run("close", self.watch.close if self.consensus.is_single_rank else self.watch.stop_reading)

    # ------------------------------------------------------------------ a step

    def _before(self, optimizer: Any, has_closure: bool) -> None:
        found_inf = getattr(optimizer, FOUND_INF, None)
        if found_inf is not None and self.schedule.plan(self.step):
            self.watch.log(FOUND_INF, found_inf, 0)
        self._has_closure = has_closure
        self.watch.before_update(optimizer, gradients_ready=not has_closure)
        self.checkpoint.before_update(self.step, complete=not self.watch.adopted_only)
        self._dump_before_update()
        if not has_closure:
            self._judge()

    def _gradients_arrived(self, optimizer: Any) -> None:
        self._has_closure = False  # they are not read again after the update
        self.watch.read_gradients(optimizer)
        self._judge()

    def _after(self, optimizer: Any) -> None:
        self.watch.after_update(optimizer, gradients_ready=self._has_closure)

    def _skip(self, optimizer: Any) -> None:
        if not self.skipped and self.schedule.plan(self.step):
            self.watch.log(SKIPPED, 1.0, 0)
        self.skipped = True
        self._refused(optimizer)

    def _refused(self, optimizer: Any) -> None:
        self.watch.skipped(optimizer)
        self._dump_before_update()
        self._judge()

    def _without_optimizer(self) -> None:
        self.watch.without_optimizer()
        self._dump_before_update()
        self._judge()

    def _judge(self) -> None:
        """With `same_step`, judge the rows so far before the update uses their values."""
        if self.same_step and len(self.watch.rows):
            record = self.outbox.peek(self.watch, self.step, self.order, skipped=self.skipped)
            self._same_step.judge(record)

    def _dump_before_update(self) -> None:
        """Complete the step's dump, if there is one.

        Raises:
            TrainingStopped: when a stop has waited for the dump.

        """
        self._dump(lambda dump: dump.before_update(self.step))
        self.triggers.dump_taken(self.step)
        if self.triggers.stop is not None and self.triggers.stop_before_update:
            self._same_step.stop_before_update()

    def _note_scale(self, scaler: Any) -> None:
        if not self._scale_noted and self.schedule.plan(self.step):
            self._scale_noted = True
            self.watch.note_loss_scale(scaler)

    def _stepped(self, optimizer: Any) -> None:
        self.updated = True
        if self.step_end.stepped(id(optimizer)) and not self.ends_at_callback:
            self._end_step()

    def _end_step(self) -> None:
        """Close the step, decide with the other ranks, and open the next step, even if a part has failed.

        Raises:
            TrainingStopped: when a stop was requested.

        """
        self._run(self._close)
        for callback in self.step_callbacks:
            self.guard.run("on_step", callback, self.step)
        step, self.step = self.step, self.step + 1
        proposal = self.guard.run(PART, self._propose, step)
        agreed = self.consensus.at_boundary(step, proposal or Proposal())
        commands = self.consensus.commands(agreed, self.control.commands)
        self._run(self._begin, agreed, commands)
        stop = self.consensus.stop_after(step, agreed, self.triggers.stop)
        if stop is not None:
            self.triggers.take_stop()
            self.stopped = stop
            raise stop

    def _propose(self, step: int) -> Proposal:
        """Return this rank's proposal at the end of `step`."""
        return self.triggers.proposal(self.step, self.overhead.costs(step), self.control.look(self.step))

    def _close(self) -> None:
        """Close the step's rows, send the records that have arrived, and receive the recorder's messages."""
        self._times.note(self.watch, self._plan)
        self.watch.end_step()
        if self.guard.interrupted is not None:
            self._drop_open_step()
        self.outbox.end_step(self.watch, self.step, self.order, skipped=self.skipped)
        if not self.skipped:
            self.grad_acc_steps = checked_micro_steps(self.grad_acc_steps, self.watch.micro_steps, self.step)
        self._dump(lambda dump: dump.end_step())
        self.publish()
        self.overhead.end_step(self._plan)
        self.steps += 1
        self.triggers.receive(self.link.poll())

    def _drop_open_step(self) -> None:
        """Drop a step that Ctrl-C interrupted inside the monitor: rows may be missing or duplicated."""
        reason, self.guard.interrupted = f"{self.guard.interrupted} inside the monitor", None
        self.watch.rows.drop()
        self.outbox.begin_step()
        self._note_gap(self.step, reason)

    def _note_gap(self, step: int, reason: str) -> None:
        self.link.send(messages.GAP, gap={"sink": RING, "first_step": step, "last_step": step, "reason": reason})

    def _begin(self, agreed: Proposal | None, commands: Sequence[dict[str, Any]]) -> None:
        """Act on the ranks' agreement and open the next step."""
        self._begin_step()
        self.control.carry_out(commands, self.step)
        self.triggers.act_on(agreed, self.step)
        if self.overhead.decide(agreed.costs if agreed is not None else ()):
            self.link.send(messages.SAMPLING, line=self.overhead.sampling(self.step))
        self.counters.send_if_due()
        self._open()
        self._dump(lambda dump: dump.open_step(self.step))

    def _begin_step(self) -> None:
        self.order, self.skipped, self._scale_noted, self.updated = 0, False, False, False
        self.outbox.begin_step()
        self.scalars.end_step()

    def _open(self) -> None:
        self._plan = self.schedule.plan(self.step)
        self.watch.in_window = self.schedule.covers(self.step)
        self.watch.open_step(self._plan)

    def doing(self) -> dict[str, Any]:
        """Return this rank's activity: its step, the collective it waits in, and the open collectives."""
        return {"step": self.step, **self.watch.doing()}

    def publish(self, *, wait: bool = False) -> None:
        """Send the records whose rows have arrived; with `wait`, all of them."""
        for record, judged in self.outbox.arrived(wait=wait):
            if not judged and self.overflow.judge(record) is not None:
                self.limit.check(self.step)
            self.count_skipped(record)
            try:
                self.outbox.send(record)
            except KeyboardInterrupt as error:
                self._note_gap(record.step, f"{type(error).__name__} inside the monitor")
                raise
            self.first_steps.look_at(record)

    def count_skipped(self, record: StepRecord) -> None:
        """Count a step that the loss scaler skipped, once, although an examined step is sent in several records."""
        if record.skipped and record.step != self._last_skipped:
            self._last_skipped = record.step
            self.skipped_steps += 1

    def _dump(self, action: Callable[[Any], None]) -> None:
        if self.triggers.dump is not None:
            self.guard.run(DUMP, action, self.triggers.dump)
            if DUMP in self.guard.disabled:
                self.triggers.dump.abandon()
                self.triggers.dump = None
