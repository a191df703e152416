"""`TrainMonitor`: the object with which a user monitors a training run."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainsentry.anomaly.incident import Incident, worst_first
from trainsentry.collectors.backend import Framework
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.control.config_file import ConfigFile
from trainsentry.monitor.errors import ConfigError, TrainingStopped
from trainsentry.monitor.ranks.rank_group import RankGroup, join_ranks
from trainsentry.monitor.ranks.unwatched_rank import UnwatchedRank
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.start import NoThread
from trainsentry.monitor.trainer.closing_line import print_closing_line
from trainsentry.monitor.trainer.ending import FLUSH_SECONDS, cancel_close_at_exit, close_at_exit, end_recorder
from trainsentry.monitor.trainer.flight_recorder import metrics_of, table_of_records
from trainsentry.monitor.trainer.one_monitor import close_older, forget
from trainsentry.monitor.trainer.saved_state import checked_state, encoded, state_of
from trainsentry.monitor.trainer.step_loop import StepCallback, StepLoop
from trainsentry.monitor.trainer.triggers import Callback
from trainsentry.monitor.trainer.wiring import (
    NO_COMMON_STOP,
    MonitorView,
    RunStart,
    check_no_common_stop,
    check_number,
    start_loop,
)

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Self


class TrainMonitor:
    """Watches a training run: collects statistics, detects anomalies, acts on incidents.

    >>> monitor = TrainMonitor({"output_dir": "somewhere", "detect": True})

    `config` is a path to a .json, .yaml or .toml file, a mapping, a `MonitorConfig`, or None for the
    defaults. The monitor does nothing before `watch`. A file is read again when it changes while the training runs.

    Raises:
        ConfigError: for an unknown key or a value that is not allowed.

    """

    def __init__(self, config: "str | Path | Mapping[str, Any] | MonitorConfig | None" = None) -> None:
        self.config = load_config(config)
        self.config_file = ConfigFile(Path(config)) if isinstance(config, (str, Path)) else None
        self._guard = Guard(strict=self.config.strict)
        self._table = SeriesTable()
        self._loop: StepLoop | None = None
        self._callbacks: list[Callback] = []
        self._step_callbacks: list[StepCallback] = []
        self._incidents: dict[int, Incident] = {}
        self._saved_state: dict[str, Any] | None = None
        self._rank_group: RankGroup | None = None
        self._unwatched_rank: UnwatchedRank | None = None
        self._is_first = True
        self._cannot_agree = False
        self._not_watched = False
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

        A later call adds other modules. `grad_scaler` is optional; with it, gradients of micro-steps are
        unscaled from the first step on. `grad_acc_steps` is compared with the forward passes of a step.
        `start_step` is the number of the next step, for a resumed run.

        Raises:
            TypeError: for an object that is not a model, optimizer or scaler of a supported framework.
            ValueError: for a model without parameters or one already watched, an optimizer of another
                model, a pattern that matches nothing, a rank that does not exist, or a negative number.
            RuntimeError: after `close`.

        """
        if self._closed:
            raise RuntimeError("watch: this monitor is closed; make a new TrainMonitor")
        check_number("start_step", start_step, 0)
        check_number("grad_acc_steps", grad_acc_steps, 1)
        from trainsentry.monitor.frameworks import framework_of

        framework = framework_of(model)
        close_older(self, Path(self.config.output_dir), model)
        rank, watched = self._join_ranks(framework)
        if start_step == 0 and self._saved_state is not None and self._loop is None:
            start_step = int(self._saved_state["step"])
        if rank not in watched or self._unwatched_rank is not None:
            self._follow(framework, (model, optimizer, grad_scaler), start_step)
            return self
        if self._loop is not None:
            self._loop.watch.add(model, optimizer, grad_scaler)
        elif not self._not_watched:
            self._loop = self._start_or_do_without(framework, (model, optimizer, grad_scaler), start_step)
        if self._loop is None:
            return self
        if grad_acc_steps is not None:
            self._loop.grad_acc_steps = grad_acc_steps
        self._loop.begin()
        return self

    def _join_ranks(self, framework: Framework) -> tuple[int, list[int]]:
        """Join the other ranks at the first call; return this rank and the watched ranks."""
        rank, world_size = framework.rank_and_world_size()
        try:
            watched = self.config.watched_ranks(world_size)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._is_first = rank == watched[0]
        if self._rank_group is None and self._loop is None and self._unwatched_rank is None and not self._not_watched:
            self._rank_group = join_ranks(self.config, framework, watched, self._guard)
            if self._rank_group is None and world_size > 1:
                self._cannot_agree = True
                check_no_common_stop(self.config)
        return rank, watched

    def _start_or_do_without(
        self, framework: Framework, watched: tuple[Any, Any, Any], start_step: int
    ) -> StepLoop | None:
        """Start the loop; if memory, descriptors or threads run out, the training continues unwatched."""
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
            run = RunStart(
                self.config,
                framework,
                rank,
                world_size,
                start_step,
                self._rank_group,
                self._saved_state,
                self.config_file,
            )
            shared = MonitorView(self._table, self._guard, self._callbacks, self._incidents, self._step_callbacks)
            loop = start_loop(run, watch, shared)
            watch.listen(loop)
        except BaseException:
            watch.close()  # a failed call leaves no hook on the model
            raise
        loop.owner = self
        if self._rank_group is not None:
            self._rank_group.watch_for_hangs(self.config, loop.doing)
        return loop

    def _follow(self, framework: Framework, watched: tuple[Any, Any, Any], start_step: int) -> None:
        """Read nothing; count steps, so that this rank decides and stops with the watched ranks."""
        if self._rank_group is None:
            self._not_watched = True
            self._saved_state = self._saved_state or state_of(start_step)
            return
        if self._unwatched_rank is not None:
            self._unwatched_rank.follow(framework.follow(*watched, self._unwatched_rank))
            return
        self._unwatched_rank = UnwatchedRank(
            self._rank_group.consensus, self._rank_group.schedule, self._guard, start_step
        )
        self._unwatched_rank.follow(framework.follow(*watched, self._unwatched_rank))
        self._rank_group.watch_for_hangs(self.config, self._unwatched_rank.doing)
        close_at_exit(self)

    # ------------------------------------------------------------------ in the loop

    def step(self) -> None:
        """Mark a step boundary in a training loop without a watched optimizer.

        Raises:
            RuntimeError: before `watch`, or when a watched optimizer marks the boundaries already.

        """
        if self._unwatched_rank is not None:
            self._unwatched_rank.step_marked()
        loop = self._running("step")
        if loop is None:
            return
        if loop.watch.takes_boundaries:
            raise RuntimeError("step: the watched optimizer marks the step boundary; remove the call of monitor.step()")
        if not loop.watch.step_has_ended:
            loop.marked()

    def ends_at_callback(self, at_callback: bool) -> None:
        """Choose what ends a step and raises stops: a call of `step_ended` (True), or the optimizers (False)."""
        if self._unwatched_rank is not None:
            self._unwatched_rank.ends_at_callback = at_callback
        loop = self._running("ends_at_callback")
        if loop is not None:
            loop.ends_at_callback = loop.stops_at_boundary = at_callback

    def gradients_arrived(self, optimizer: Any) -> None:
        """Judge the gradients of a closure inside `optimizer.step` before the update, from a trainer's callback."""
        loop = self._running("gradients_arrived")
        if loop is not None:
            loop.gradients_arrived(optimizer)

    def step_ended(self) -> None:
        """Mark a step boundary instead of the optimizers, from a trainer's callback."""
        if self._unwatched_rank is not None:
            self._unwatched_rank.boundary()
        loop = self._running("step_ended")
        if loop is not None:
            loop.boundary()

    def log(self, **scalars: Any) -> None:
        """Record scalars such as `loss` in the current step, without waiting for device tensors."""
        loop = self._running("log")
        if loop is not None:
            loop.log(scalars)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """The incidents so far, worst first."""
        loop = self._loop
        if loop is not None and not self._closed:
            self._guard.run("incidents", lambda: loop.triggers.receive(loop.link.poll()))
        return worst_first(self._incidents.values())

    def on_incident(self, callback: Callback) -> None:
        """Call `callback(incident)` once per incident, in the training thread at a step boundary."""
        self._callbacks.append(callback)

    def on_step(self, callback: StepCallback) -> None:
        """Call `callback(step)` at the end of every step, in the training thread, after the step's rows are read."""
        self._step_callbacks.append(callback)

    def request_stop(self, reason: str) -> None:
        """Stop training: raise `TrainingStopped` on all ranks at the same step boundary.

        A single rank stops at the next boundary; several ranks need one more boundary to agree.

        Raises:
            RuntimeError: before `watch`, or on several ranks that have no connection to agree on a stop.

        """
        loop = self._running("request_stop")
        if self._cannot_agree:
            raise RuntimeError(f"request_stop: {NO_COMMON_STOP}")
        if loop is not None:
            loop.triggers.stop = TrainingStopped(loop.step, reason)
        elif self._unwatched_rank is not None:
            self._unwatched_rank.stop = TrainingStopped(self._unwatched_rank.step, reason)
        elif self._not_watched:
            self._guard.warn_once("request_stop", f"this rank is not watched, so it cannot stop the training: {reason}")

    # ------------------------------------------------------------------ results

    def records(self, last: int | None = None) -> "pd.DataFrame":
        """Return the flight recorder's `last` steps (default: all) as a table with a row per step and series."""
        return table_of_records(self._arrived(), self._table, self.config.numbers, last)

    def metrics(self, quantity: str) -> dict[str, dict[str, float]]:
        """Return the newest step's statistics of a quantity, `{name: {statistic: value}}`."""
        return metrics_of(self._arrived(), self._table, self.config.numbers, quantity)

    def flush(self) -> None:
        """Wait until the recorder has judged and written every step so far."""
        loop = self._running("flush")
        if loop is not None:
            self._guard.run("flush", self._flush, loop)

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the detectors' state (of nothing without a recorder) and fingerprints of all tensors.

        `torch.distributed.checkpoint` accepts the monitor itself, also before `watch`, and stores one rank's state for
        all ranks. That rank resumes its detectors from it; those of the other ranks start without learned state.
        """
        loop = None if self._closed else self._loop
        if loop is None:
            known = self._saved_state or state_of(0)
            return encoded(known if self._unwatched_rank is None else {**known, "step": self._unwatched_rank.step})
        learned = self._guard.run("state_dict", self._ask_state, loop)
        return encoded(state_of(loop.step, learned, loop.rank, loop.checkpoint.save(loop.step)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the step and the detectors' state of an earlier run, before or after `watch`.

        Raises:
            ValueError: when `state` did not come from `state_dict`.

        """
        self._saved_state = checked_state(state)
        if self._unwatched_rank is not None:
            self._unwatched_rank.go_to(state["step"])
        if self._loop is not None and not self._closed:
            self._loop.resume(self._saved_state)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Flush everything, end the recorder, remove every hook and patch. Safe to call twice."""
        if self._closed or not self._guard.in_training_process:
            return
        self._closed = True
        self._guard.suspended = 0  # a graph capture that never ended must not block the closing
        if self._loop is not None:
            loop = self._loop
            self._saved_state = state_of(loop.step)
            self._guard.run("close: hooks", loop.watch.close)
            self._guard.run("close: recorder", end_recorder, loop, Path(self.config.output_dir))
            if self._is_first or loop.link.gaps.to_json():
                incidents = worst_first(self._incidents.values())
                self._guard.run("close: last line", print_closing_line, loop, self.config.output_dir, incidents)
        if self._unwatched_rank is not None:
            self._guard.run("close: hooks", self._unwatched_rank.close)
        if self._rank_group is not None:
            self._guard.run("close: ranks", self._rank_group.close)
        cancel_close_at_exit(self)
        forget(self)

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ pieces

    def _running(self, call: str) -> StepLoop | None:
        """Return the step loop; None after `close`, and on a rank that is not watched.

        Raises:
            RuntimeError: before `watch`.

        """
        unwatched = self._unwatched_rank is not None or self._not_watched
        if self._loop is None and not unwatched:
            raise RuntimeError(f"{call}: nothing is watched yet; call watch(model, optimizer) first")
        return None if self._closed or unwatched else self._loop

    def _arrived(self) -> list[StepRecord]:
        """Return the flight recorder's records, with those still on the device."""
        loop = self._loop
        if loop is None:
            return []
        if not self._closed:
            self._guard.run("records", lambda: loop.publish(wait=True))
        return list(loop.outbox.records)

    def _ask_state(self, loop: StepLoop) -> dict[str, Any] | None:
        loop.publish(wait=True)
        received, answer = loop.link.ask(messages.STATE, messages.STATE, FLUSH_SECONDS)
        loop.triggers.receive(received)
        return answer["state"] if answer is not None else None

    def _flush(self, loop: StepLoop) -> None:
        loop.publish(wait=True)
        loop.counters.send()
        received, _ = loop.link.ask(messages.FLUSH, messages.FLUSHED, FLUSH_SECONDS)
        loop.triggers.receive(received)
