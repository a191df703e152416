"""The monitor of a training run: what a user holds in the hand."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainsentry.anomaly.incident import Incident
from trainsentry.collectors.backend import Framework, Rendezvous
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.ranks.connection import RendezvousBroken
from trainsentry.collectors.series import SeriesTable
from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.errors import ConfigError, TrainingStopped
from trainsentry.monitor.ranks.rank_group import RankGroup
from trainsentry.monitor.ranks.unwatched_rank import UnwatchedRank
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.start import NoThread
from trainsentry.monitor.trainer.ending import FLUSH_SECONDS, close_at_exit, end_recorder, is_closed
from trainsentry.monitor.trainer.flight_recorder import metrics_of, table_of_records
from trainsentry.monitor.trainer.saved_state import checked_state, detection_for, state_of
from trainsentry.monitor.trainer.step_loop import StepLoop
from trainsentry.monitor.trainer.triggers import Callback
from trainsentry.monitor.trainer.wiring import MonitorView, RunStart, check_alone, check_number, start_loop

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Self


class TrainMonitor:
    """Watches a training run: collects statistics, detects anomalies, acts on incidents.

    >>> monitor = TrainMonitor({"output_dir": "somewhere", "detect": True})

    `config` is a path to a .json, .yaml or .toml file, a mapping, a `MonitorConfig`, or nothing for the
    defaults. Nothing happens before `watch`.

    Raises:
        ConfigError: for a configuration that is not allowed.

    """

    def __init__(self, config: "str | Path | Mapping[str, Any] | MonitorConfig | None" = None) -> None:
        self.config = load_config(config)
        self._guard = Guard(strict=self.config.strict)
        self._table = SeriesTable()
        self._loop: StepLoop | None = None
        self._callbacks: list[Callback] = []
        self._incidents: dict[int, Incident] = {}
        self._saved_state: dict[str, Any] | None = None
        self._rank_group: RankGroup | None = None
        self._unwatched_rank: UnwatchedRank | None = None
        self._speaks = True
        self._alone = False
        self._left_out = False
        self._closed = False

    # ------------------------------------------------------------------ watching

    def watch(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        grad_scaler: Any = None,
        grad_acc_steps: int | None = None,
        start_step: int = 0,
    ) -> "TrainMonitor":
        """Watch a model (or a list of model chunks) and its optimizer or optimizers; return the monitor.

        Called again with other modules it adds them. `grad_scaler` may be left out; with it, gradients of
        micro-steps are unscaled from the first step on. `grad_acc_steps` is checked against what is seen.
        `start_step` is the number of the coming step, for a run that is resumed.

        Raises:
            TypeError: for objects that are no model, optimizer or scaler of a framework that is supported.
            ValueError: for a model that has no parameters or is watched already, an optimizer of another
                model, a pattern that matches nothing, a rank that does not exist, or a negative number.

        """
        if self._closed:
            raise RuntimeError("watch: this monitor is closed; make a new TrainMonitor")
        check_number("start_step", start_step, 0)
        check_number("grad_acc_steps", grad_acc_steps, 1)
        from trainsentry.monitor.frameworks import framework_of

        framework = framework_of(model)
        rank, watched = self._meet(framework)
        if start_step == 0 and self._saved_state is not None and self._loop is None:
            start_step = int(self._saved_state["step"])
        if rank not in watched or self._unwatched_rank is not None:
            self._follow(framework, (model, optimizer, grad_scaler), start_step)
            return self
        if self._loop is not None:
            self._loop.watch.add(model, optimizer, grad_scaler)
        elif not self._left_out:
            self._loop = self._start_or_do_without(framework, (model, optimizer, grad_scaler), start_step)
        if self._loop is None:
            return self
        if grad_acc_steps is not None:
            self._loop.grad_acc_steps = grad_acc_steps
        self._loop.begin()
        return self

    def _meet(self, framework: Framework) -> tuple[int, list[int]]:
        """Meet the other ranks, the first time; return this rank and those that are watched."""
        rank, world_size = framework.rank_and_world_size()
        try:
            watched = self.config.watched_ranks(world_size)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._speaks = rank == watched[0]
        if self._rank_group is None and self._loop is None and self._unwatched_rank is None and not self._left_out:
            rendezvous = framework.meet()
            if rendezvous is not None:
                self._rank_group = self._join(framework, rendezvous, watched)
            if self._rank_group is None:
                self._alone = world_size > 1
                check_alone(self.config, world_size)
        return rank, watched

    def _join(self, framework: Framework, rendezvous: Rendezvous, watched: list[int]) -> RankGroup | None:
        try:
            return RankGroup(self.config, framework, rendezvous, watched, self._guard)
        except RendezvousBroken as error:
            self._guard.warn_once("ranks", f"each rank is watched by itself: {error}")
            rendezvous.close(broken=True)
            return None

    def _start_or_do_without(
        self, framework: Framework, watched: tuple[Any, Any, Any], start_step: int
    ) -> StepLoop | None:
        """Start the loop; where the machine has nothing left for it, have the training go on unwatched."""
        try:
            loop = self._start(framework, watched, start_step)
        except (OSError, MemoryError, NoThread) as error:
            if self.config.strict:
                raise
            self._guard.warn_once(
                "watch", f"this run is not watched: {type(error).__name__}: {error}. Training goes on."
            )
            if self._rank_group is not None:
                self._rank_group.stop_listening()
            self._follow(framework, watched, start_step)
            return None
        close_at_exit(self)
        return loop

    def _start(self, framework: Framework, watched: tuple[Any, Any, Any], start_step: int) -> StepLoop:
        watch = framework.new_watch(self._table, self._guard, self.config.collect_settings())
        rank, world_size = framework.rank_and_world_size()
        try:
            watch.add(*watched)
            if self._rank_group is not None:
                watch.own_group = self._rank_group.rendezvous.name
            if world_size > 1 and self.config.collect.communication is not None:
                watch.watch_communication()
            run = RunStart(self.config, framework, rank, world_size, start_step, self._rank_group, self._saved_state)
            shared = MonitorView(self._table, self._guard, self._callbacks, self._incidents)
            loop = start_loop(run, watch, shared)
            watch.listen(loop)
        except BaseException:
            watch.close()  # a call that fails leaves no hook behind
            raise
        loop.owner = self
        if self._rank_group is not None:
            self._rank_group.watch_for_hangs(self.config, loop.doing)
        return loop

    def _follow(self, framework: Framework, watched: tuple[Any, Any, Any], start_step: int) -> None:
        """Count steps with the ranks that are watched."""
        if self._rank_group is None:
            self._left_out = True
            self._saved_state = self._saved_state or state_of(start_step)
            return
        if self._unwatched_rank is not None:
            self._unwatched_rank.follow(framework.follow(*watched, self._unwatched_rank))
            return
        self._unwatched_rank = UnwatchedRank(
            self._rank_group.common, self._rank_group.schedule, self._guard, start_step
        )
        self._unwatched_rank.follow(framework.follow(*watched, self._unwatched_rank))
        self._rank_group.watch_for_hangs(self.config, self._unwatched_rank.doing)
        close_at_exit(self)

    # ------------------------------------------------------------------ in the loop

    def step(self) -> None:
        """Mark a step boundary in a loop without an optimizer that is watched.

        Raises:
            RuntimeError: when the boundaries are taken from a watched optimizer already.

        """
        if self._unwatched_rank is not None:
            self._unwatched_rank.step_marked()
        loop = self._running("step")
        if loop is None:
            return
        if loop.watch.takes_boundaries:
            raise RuntimeError("step: the watched optimizer's step is the boundary; leave monitor.step() out")
        if not loop.watch.step_has_ended:
            loop.boundary()

    def ends_at_callback(self, at_callback: bool) -> None:
        """Leave it to `step_ended`, or again to the optimizers' own calls, to tell when a step is over."""
        if self._unwatched_rank is not None:
            self._unwatched_rank.ends_elsewhere = at_callback
        loop = self._running("ends_at_callback")
        if loop is not None:
            loop.ends_elsewhere = at_callback

    def step_ended(self) -> None:
        """Mark a step boundary in the place of the optimizers: for trainers that tell when a step is over."""
        if self._unwatched_rank is not None:
            self._unwatched_rank.boundary()
        loop = self._running("step_ended")
        if loop is not None:
            loop.boundary()

    def log(self, **scalars: Any) -> None:
        """Take scalars such as `loss` into the current step; device tensors are not waited for."""
        loop = self._running("log")
        if loop is not None:
            loop.log(scalars)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """The incidents so far, worst first."""
        if self._loop is not None and not self._closed:
            self._guard.run("incidents", self._hear)
        return tuple(sorted(self._incidents.values(), key=lambda i: (i.severity != "critical", -i.score, i.first_seen)))

    def on_incident(self, callback: Callback) -> None:
        """Have `callback(incident)` called in the training thread, at a step boundary, once per incident."""
        self._callbacks.append(callback)

    def request_stop(self, reason: str) -> None:
        """Stop training on all ranks, at the same step boundary, with `TrainingStopped`.

        A single rank stops at the next boundary; several need one boundary more to agree.
        """
        loop = self._running("request_stop")
        if self._alone:
            raise RuntimeError(
                "request_stop: the ranks of this framework cannot agree on a stop, and one that stops alone leaves the "
                "others waiting"
            )
        if loop is not None:
            loop.triggers.stop = TrainingStopped(loop.step, reason)
        elif self._unwatched_rank is not None:
            self._unwatched_rank.stop = TrainingStopped(self._unwatched_rank.step, reason)
        elif self._left_out:
            self._guard.warn_once("request_stop", f"nothing is watched here, so nothing can be stopped: {reason}")

    # ------------------------------------------------------------------ what was seen

    def records(self, last: int | None = None) -> "pd.DataFrame":
        """Return the flight recorder's `last` steps (all it holds by default) as a table, a row per series."""
        records = [] if self._loop is None else self._arrived()
        return table_of_records(records, self._table, tuple(self.config.statistics), last)

    def metrics(self, quantity: str) -> dict[str, dict[str, float]]:
        """Return the newest step's statistics of a quantity, `{name: {statistic: value}}`."""
        records = [] if self._loop is None else self._arrived()
        return metrics_of(records, self._table, tuple(self.config.statistics), quantity)

    def flush(self) -> None:
        """Wait until everything recorded so far is detected upon and written."""
        loop = self._running("flush")
        if loop is not None:
            self._guard.run("flush", self._flush, loop)

    def state_dict(self) -> dict[str, Any]:
        """Return step and detector state, for the user's checkpoint. `detection` is None when it cannot be had.

        A `torch.distributed.checkpoint` takes the monitor itself, and keeps the state of one rank for all; what the
        detectors of that rank have learned is taken up by it alone, and the others learn anew.
        """
        loop = self._running("state_dict")
        if loop is None:
            step = self._unwatched_rank.step if self._unwatched_rank is not None else 0
            return self._saved_state or state_of(step)
        return state_of(loop.step, self._guard.run("state_dict", self._ask_state, loop), loop.rank)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of an earlier run; called before `watch`, it also sets the first step.

        Raises:
            ValueError: when `state` is not one of `state_dict`.

        """
        self._saved_state = checked_state(state)
        if self._unwatched_rank is not None:
            self._unwatched_rank.go_to(state["step"])
        if self._loop is not None and not self._closed:
            self._loop.go_to(state["step"])
            learned = detection_for(self._loop.rank, self._saved_state)
            self._loop.link.send(messages.LOAD_STATE, state=learned, step=state["step"])

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Flush everything, end the recorder, remove every hook and patch. Safe to call twice."""
        if self._closed or not self._guard.in_training_process:
            return
        self._closed = True
        self._guard.suspended = 0  # a capture that was begun and never ended holds nobody back now
        if self._loop is not None:
            loop = self._loop
            self._saved_state = state_of(loop.step)
            self._guard.run("close: hooks", loop.watch.close)
            self._guard.run("close: recorder", end_recorder, loop, Path(self.config.output_dir))
            gaps = loop.link.gaps.to_json()
            if self._speaks or gaps:
                loop.overhead.tell_at_end(self.config.output_dir, len(self._incidents), gaps, loop.link.nothing_written)
        if self._unwatched_rank is not None:
            self._guard.run("close: hooks", self._unwatched_rank.close)
        if self._rank_group is not None:
            self._guard.run("close: ranks", self._rank_group.close)
        is_closed(self)

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ pieces

    def _running(self, call: str) -> StepLoop | None:
        """Return the step loop, or None where this rank is left out.

        Raises:
            RuntimeError: before `watch`, or after `close`.

        """
        if self._unwatched_rank is not None or self._left_out:
            return None
        if self._loop is None:
            raise RuntimeError(f"{call}: nothing is watched yet; call watch(model, optimizer) first")
        return None if self._closed else self._loop

    def _arrived(self) -> list[Any]:
        assert self._loop is not None
        if not self._closed:
            self._guard.run("records", self._publish_all)
        return list(self._loop.records.recorded)

    def _publish_all(self) -> None:
        assert self._loop is not None
        self._loop.publish(wait=True)

    def _hear(self) -> None:
        assert self._loop is not None
        self._loop.triggers.hear(self._loop.link.poll())

    def _ask_state(self, loop: StepLoop) -> dict[str, Any] | None:
        loop.publish(wait=True)
        heard, answer = loop.link.ask(messages.STATE, messages.STATE, FLUSH_SECONDS)
        loop.triggers.hear(heard)
        return answer["state"] if answer is not None else None

    def _flush(self, loop: StepLoop) -> None:
        loop.publish(wait=True)
        loop.counters.tell()
        heard, _ = loop.link.ask(messages.FLUSH, messages.FLUSHED, FLUSH_SECONDS)
        loop.triggers.hear(heard)
