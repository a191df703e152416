"""Records one rank: judges its records, writes them through the sinks, and answers the trainer."""

import math
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.detection import detection_for
from trainsentry.anomaly.learned_state import LEARNED_STATE
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.settings import ACTIVATIONS
from trainsentry.exporters.csv.writer import next_restart
from trainsentry.exporters.files.json_files import append_lines, replace_json, write_run
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.hang_report import HangReport
from trainsentry.monitor.recorder.publisher import IncidentPublisher
from trainsentry.monitor.recorder.ranks.rank_tree import RankTree
from trainsentry.monitor.recorder.ranks.tree_position import TreePosition
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.sinks.claim import RENEW_SECONDS, claim_start, release, renew
from trainsentry.monitor.recorder.sinks.events import Alerts, StatusExporters
from trainsentry.monitor.recorder.sinks.gaps import Gaps
from trainsentry.monitor.recorder.sinks.output_directory import DirectoryWatch, quota_works, rewrite_removed_files
from trainsentry.monitor.recorder.sinks.writers import Writers, WriterThread
from trainsentry.monitor.recorder.status import StatusReporter, lag_of, seconds_of, status_of

STATUS_SECONDS: Final = 1.0
"""Seconds between two writes of `status.json`: fresh enough for a person, rare enough for a shared file system."""

JOURNAL: Final = "journal"
"""The sink that writes everything but tables and curves: incidents, anomalies, overflows, status, graph."""

DETECTION: Final = "detection"
"""The part that judges records; records it did not judge are a gap too."""

KEPT_RECORDS: Final = 20
"""Records that a quiet rank keeps, so that its files begin before the incident does."""

QUOTA_STEPS: Final = 100
"""Records between two checks of the disk quota."""


class Session:
    """Handles the messages of one rank's ring. `send` carries messages to the trainer and never blocks.

    A quiet rank, one of many, writes no files of its own until an incident names it.
    """

    def __init__(self, settings: RecorderSettings, send: Callable[[dict[str, Any]], None]) -> None:
        self.settings = settings
        self.send = send
        self.table = SeriesTable()
        if settings.definitions:
            self.table.define(settings.definitions)
        self.root = Path(settings.output_dir)
        self.directory = self.root / f"rank{settings.rank}"
        self.incidents_file, self.run_file = (
            self.root / settings.file_name(n) for n in ("incidents.jsonl", "run.json")
        )
        self.detection = detection_for(self.table, settings.detect, self._rule_failed)
        self.incidents = IncidentPublisher(self)
        self.gaps = Gaps(settings.gaps)
        self.status_reporter = StatusReporter(self.gaps, send)
        self.journal = WriterThread(JOURNAL, self.gaps, settings.max_wait)
        self.writers = Writers(settings, self.directory, self.table, settings.restart, self.gaps)
        self.rank_tree: RankTree | None = None
        self.global_writers: Writers | None = None
        if settings.position is not None:
            self._join(settings.position)
        self.counters: dict[str, Any] = {}
        self.step = settings.start_step - 1
        self.records = 0
        self.restart = settings.restart
        self.time = 0.0
        self.newest: Callable[[], tuple[int, float] | None] = lambda: None
        self.graph: dict[str, Any] = {}
        self.run: dict[str, Any] = {}
        self._directory_watch = DirectoryWatch(self.directory)
        self._kept: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)
        self._status_at = self._checked_at = self._renewed_at = -math.inf
        self._faults: dict[str, str] = {}  # of detection, or of its rules, that are off
        self._mismatches: list[Anomaly] = []
        self._hang = HangReport(self.directory)
        self.alerts = Alerts(settings, self.directory, self.table, self.failed)
        self.status_exporters = StatusExporters(settings, self.directory, self.table, self.gaps)

    def _join(self, position: TreePosition) -> None:
        """Connect to the recorders of the other ranks; at the root, open the writers of whole tensors."""
        self.rank_tree = RankTree(position, self, self.settings.max_wait)
        if self.rank_tree.is_root and self.rank_tree.assembly is not None:
            directory = self.root / "global"
            restart = max(next_restart(directory), self.settings.restart)
            table = self.rank_tree.assembly.table
            self.global_writers = Writers(self.settings, directory, table, restart, self.gaps)

    @property
    def is_root(self) -> bool:
        """Whether incidents are made here: on a single rank, at the root of several ranks, or on a rank cut off."""
        return self.rank_tree is None or self.rank_tree.is_root or self.rank_tree.alone

    # ------------------------------------------------------------------ records

    def take_record(self, record: StepRecord) -> None:
        """Judge a record, so that the trainer receives an incident early; then write it."""
        self.step, self.records = max(self.step, record.step), self.records + 1
        self.time = record.time
        found = self._judge(record)
        if record.examined and self.is_root:
            self.send({"type": messages.EXAMINED, "step": record.step})
        self.writers.write(record)
        if record.overwritten:
            reason = (
                f"{counted(record.overwritten, 'tensor')} changed before being read; from now on each is read at once"
            )
            self.gaps.add(ACTIVATIONS, record.step, record.step, reason)
        if self.settings.quiet:
            self._kept.append(record)
        if self.rank_tree is not None:
            self.rank_tree.take_own(record)
            self.rank_tree.pump()
        self.incidents.write_found(record, found)
        self.journal.settle()
        if self.records % QUOTA_STEPS == 0:
            self._keep_quota()
        self.status_reporter.send(self.sinks)
        self.status_reporter.send_lag(*lag_of(self.step, self.time, self.newest()))
        self._renew_status()

    def look_at(self, record: StepRecord) -> None:
        """Judge a record before its turn by the rules without a history; at the root it may open an incident."""
        if self.detection is None or not self.is_root:
            return
        found = self.detection.certain(record)
        if found:
            self.incidents.observe(found, record.step, activations=False)

    def _judge(self, record: StepRecord) -> list[Anomaly]:
        """Run the detectors and update the incidents; if either fails, records are still written."""
        for part, reason in self._faults.items():
            self.gaps.note(part, record.step, record.step, reason)
        if self.detection is None:
            return []
        try:
            found = [*self._mismatches, *self.detection.judge(record)]
            self._mismatches = []
            activations = self.detection.facts.output[record.where].any()
            self.incidents.take(record, found, activations=bool(activations))
        except Exception as error:  # noqa: BLE001 - a detector may raise anything
            self.detection = None
            self._turned_off(DETECTION, error)
            return []
        return found

    def _rule_failed(self, name: str, error: Exception) -> None:
        self._turned_off(f"rule {name}", error)

    def _turned_off(self, part: str, error: Exception) -> None:
        """Report detection, or a rule of it, that has failed in this step and judges no more."""
        self._faults[part] = f"{type(error).__name__}: {error}"
        self.failed(part, error, self.step)

    def failed(self, part: str, error: Exception, step: int) -> None:
        """Report a fault of the recorder to the trainer, which logs it."""
        trace = "".join(traceback.format_exception(error))
        self.gaps.note(part, max(step, 0), max(step, 0), f"{type(error).__name__}: {error}")
        if part not in self._faults:  # what stays off has a gap that stays open
            self.gaps.end(part)
        self.send({"type": messages.FAILURE, "part": part, "message": trace, "step": step})

    def check_periodically(self) -> None:
        """Once a second: report on the sinks, check the directory, renew its claim, look for a step that hangs."""
        now = time.monotonic()
        if now - self._checked_at < STATUS_SECONDS:
            return
        self._checked_at = now
        self.status_reporter.send(self.sinks)
        self.write_rank_file(lambda: self._directory_watch.check(self._rewrite_removed_files), self.step)
        if now - self._renewed_at >= RENEW_SECONDS:
            self._renewed_at = now
            self.journal.submit(lambda: renew(self.settings.claim), self.step)
        if self.is_root and self.detection is not None:
            self._check_for_hang()

    def _rewrite_removed_files(self) -> None:
        """Rewrite the incidents and the files that are replaced as a whole, as somebody removed the directory."""
        self.gaps.add(JOURNAL, self.settings.start_step, max(self.step, 0), f"{self.directory} was removed")
        incidents = [i.to_json() for i in self.incidents.incidents.values()] if self.is_root else []
        rewrite_removed_files(
            self.settings.claim,
            (self.rank_file("graph.json"), self.graph),
            (self.run_file, self.run),
            (self.incidents_file, incidents),
        )

    def _check_for_hang(self) -> None:
        """Turn a step that hangs into an incident: the training process cannot report it through the ring."""
        found = self._hang.news()
        if found is not None:
            self.incidents.take_between_ranks([found], found.step)
            self.settle_all()

    def take_from_root(self, message: dict[str, Any]) -> None:
        """Pass a message of the root on to this rank's trainer, unless it is addressed to another rank."""
        if message.get("for", self.settings.rank) != self.settings.rank:
            return
        if message["type"] == messages.INCIDENT:
            self.incidents.take_from_root(message["incident"])
            if self.settings.quiet and message["incident"]["rank"] == self.settings.rank:
                self._begin_files()
        self.send(message)

    def _begin_files(self) -> None:
        """Begin to write this rank's files, with its kept records first: an incident names the rank."""
        claim = claim_start(self.directory, self.settings.restart)
        self.restart = claim.restart
        self.settings = replace(
            self.settings, quiet=False, restart=claim.restart, claim=claim.to_json(), beside=claim.beside
        )
        self.writers = Writers(self.settings, self.directory, self.table, self.settings.restart, self.gaps)
        for record in self._kept:
            self.writers.write(record)
        self._kept.clear()
        graph = self.graph
        self.write_rank_file(lambda: replace_json(self.rank_file("graph.json"), graph), self.step)
        self._renew_status("running")

    def write_global(self, record: StepRecord) -> None:
        """Write statistics of whole tensors."""
        if self.global_writers is not None:
            self.global_writers.write(record)

    # ------------------------------------------------------------------ control

    def take_control(self, message: dict[str, Any]) -> bool:
        """Handle a control message of the trainer; return False if it closes the recording."""
        kind = message["type"]
        if kind == messages.COUNTERS:
            self.counters = message["counters"]
            self._renew_status()
            self._write_cost()
        elif kind == messages.SAMPLING:
            line = message["line"]
            self.write_rank_file(lambda: append_lines(self.rank_file("sampling.jsonl"), [line]), line["step"])
        elif kind == messages.GRAPH:
            self.graph = message["graph"]
            self.write_rank_file(lambda: replace_json(self.rank_file("graph.json"), message["graph"]), self.step)
        elif kind == messages.RUN:
            self.run = message["run"]
            self.journal.submit(lambda: write_run(self.run_file, message["run"]), self.step)
            self.writers.write_settings(message["run"], self.step)
        elif kind == messages.ACTION:
            self.incidents.take_action(message)
        elif kind == messages.RECONFIGURE:
            self._reconfigure(message["config"], message["detect"])
        elif kind == messages.DATA_PARALLEL and self.rank_tree is not None:
            self.rank_tree.note_data_parallel(message)
        elif kind == messages.GAP:
            gap = message["gap"]
            self.gaps.add(gap["sink"], gap["first_step"], gap["last_step"], gap["reason"])
        elif kind in {messages.FLUSH, messages.STATE}:
            self._answer(message)
        elif kind == messages.MISMATCHES:
            self._mismatches += [Anomaly.from_json(each) for each in message["anomalies"]]
        elif kind == messages.LOAD_STATE:
            self._load(message["state"], message["step"])
        return bool(kind != messages.CLOSE)

    def _answer(self, message: dict[str, Any]) -> None:
        """Answer the trainer's request to write everything, or its request for the detectors' state."""
        if message["type"] == messages.STATE:
            state = self.detection.state() if self.detection is not None else None
            self.send({"type": messages.STATE, "state": state, "token": message["token"]})
            return
        self.settle_all()
        if self.is_root or self.rank_tree is None:
            self.send({"type": messages.FLUSHED, "token": message["token"]})
        else:
            self.rank_tree.ask_flush(message["token"])

    def _reconfigure(self, config: dict[str, Any], detect: dict[str, Any] | None) -> None:
        """Follow another configuration: exporters begin and end, and detection takes its new settings."""
        self.settings = replace(self.settings, config=config, detect=detect)
        for writers in (self.writers, self.global_writers):
            if writers is not None:
                writers.adopt(self.settings, self.step)
        self.status_exporters.close()
        self.status_exporters = StatusExporters(self.settings, self.directory, self.table, self.gaps)
        self.alerts = Alerts(self.settings, self.directory, self.table, self.failed)
        if self.detection is not None and detect is not None:
            self.detection.adopt(detect)

    def _write_cost(self) -> None:
        """Write the monitor's own cost as scalars, where an exporter shows scalars (TensorBoard)."""
        cost = self.counters["cost"]
        shown = {"monitor_share": cost["recent_share"], "monitor_seconds_a_step": cost["seconds_a_step"]}
        self.writers.write_scalars(self.step, shown)

    def _load(self, state: dict[str, Any] | None, step: int) -> None:
        """Resume from a checkpoint: load its detector state, and open new files if the steps go back."""
        if state:
            self._load_learned(state, step)
        if step > self.step:
            return
        self.incidents.go_back()
        self.step = step - 1
        if self.rank_tree is not None:
            self.rank_tree.go_back(step)
            if self.global_writers is not None:
                self.global_writers.roll_back(step)
        self.restart = self.writers.roll_back(step)

    def _load_learned(self, state: dict[str, Any], step: int) -> None:
        """Load the detectors' state; where it is unfit as a whole, they begin without any."""
        if self.detection is None:
            return
        for part, error in self.detection.load(state):
            self.failed(part, error, step)
            if part == LEARNED_STATE:
                self.detection = detection_for(self.table, self.settings.detect, self._rule_failed)

    def close(self, state: str) -> None:
        """Write everything that is left. `state` says in `status.json` how the run ended."""
        self.settle_all()
        if self.rank_tree is not None:
            self.rank_tree.close()
            self.settle_all()
        self._keep_quota()
        for writers in (self.writers, self.global_writers):
            if writers is not None:
                writers.close(self.step)
        self._renew_status(state)
        self.status_exporters.close()
        self.journal.submit(lambda: release(self.settings.claim), self.step, last=True)
        self.journal.close()
        self.status_reporter.send(self.sinks)
        self.status_reporter.send_end(self.files, seconds_of(self.settings))

    def settle_all(self) -> None:
        """Settle every incident, so that its last state is written and sent to the trainers."""
        self.incidents.settle_all()
        self._renew_status("running")
        self.journal.settle()

    # ------------------------------------------------------------------ status

    @property
    def files(self) -> list[WriterThread]:
        """The threads that write files here."""
        others = self.global_writers.sinks if self.global_writers is not None else []
        return [*self.writers.sinks, *others, self.journal]

    @property
    def sinks(self) -> list[WriterThread]:
        """The threads that write files, and those of the exporters that show the status."""
        return [*self.files, *self.status_exporters.sinks]

    def rank_file(self, name: str) -> Path:
        """Return the path of a file of this rank."""
        return self.directory / self.settings.file_name(name)

    def _keep_quota(self) -> None:
        for work in quota_works(self):
            self.journal.submit(work, self.step)

    def _renew_status(self, state: str | None = None) -> None:
        now = time.monotonic()
        if state is None and now - self._status_at < STATUS_SECONDS:
            return
        self._status_at = now
        data = status_of(self, state or "running")
        self.write_rank_file(
            lambda: replace_json(self.rank_file("status.json"), data), self.step, last=state is not None
        )
        if state is not None:
            self.journal.settle()  # the exporters read the file
        self.status_exporters.renew(self.step, now=state is not None)

    def write_rank_file(self, work: Callable[[], None], step: int, *, last: bool = False) -> None:
        """Write a file of this rank, unless the rank is quiet."""
        if not self.settings.quiet:
            self.journal.submit(work, step, last=last)
