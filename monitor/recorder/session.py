"""One rank's recording: takes records in, judges them, writes them, and tells the trainer what it found."""

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
from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.incidents.incident_log import QUIET_STEPS, IncidentLog
from trainsentry.anomaly.overflow import OverflowRule
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.exporters.csv.writer import next_restart
from trainsentry.exporters.files.json_files import append_lines, replace_json, write_run
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.hang_report import HangReport
from trainsentry.monitor.recorder.publisher import Findings, IncidentBook, next_incident_id
from trainsentry.monitor.recorder.ranks.rank_tree import RankTree
from trainsentry.monitor.recorder.ranks.shard_assembly import PENDING_STEPS
from trainsentry.monitor.recorder.ranks.tree_position import TreePosition
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.sinks.claim import RENEW_SECONDS, claim_start, release, renew
from trainsentry.monitor.recorder.sinks.disk_quota import quota_works
from trainsentry.monitor.recorder.sinks.gaps import Gaps
from trainsentry.monitor.recorder.sinks.home import DirectoryWatch, rewrite_removed_files
from trainsentry.monitor.recorder.sinks.metrics import Metrics, MetricsSink
from trainsentry.monitor.recorder.sinks.writer_thread import LAST_SECONDS, WriterThread
from trainsentry.monitor.recorder.sinks.writers import Writers
from trainsentry.monitor.recorder.status import StatusReporter, status_of
from trainsentry.monitor.recorder.webhook import begin_alert

STATUS_SECONDS: Final = 1.0
"""How often `status.json` is renewed: often enough for a person, seldom enough for a shared file system."""

JOURNAL: Final = "journal"
"""The sink of everything that is no table: incidents, anomalies, overflows, status, graph."""

DETECTION: Final = "detection"
"""The part that judges records; what it did not judge is a gap as well."""

KEPT_RECORDS: Final = 20
"""Records that a quiet rank keeps, so that its files begin before the trouble does."""

QUOTA_STEPS: Final = 100
"""Records between two looks at the disk quota."""


class Session:
    """Everything that happens behind the ring. `send` carries messages to the trainer and never blocks."""

    def __init__(self, hello: RecorderSettings, send: Callable[[dict[str, Any]], None]) -> None:
        self.hello = hello
        self.send = send
        self.table = SeriesTable()
        if hello.definitions:
            self.table.define(hello.definitions)
        self.root = Path(hello.output_dir)
        self.directory = self.root / f"rank{hello.rank}"
        self.incidents_file, self.run_file = (self.root / hello.own_name(n) for n in ("incidents.jsonl", "run.json"))
        self.detection = detection_for(self.table, hello.detect)
        rank_alone = hello.rank if hello.position is None else 0
        first_id = next_incident_id(self.incidents_file, rank_alone)
        self.incidents = IncidentLog(self.table, first_id, max(QUIET_STEPS, 2 * hello.slowest_every))
        self.overflow = OverflowRule(self.table)
        self.gaps = Gaps(hello.gaps)
        self.status_reporter = StatusReporter(self.gaps, send)
        self.journal = WriterThread(JOURNAL, self.gaps, hello.max_wait)
        self.writers = Writers(hello, self.directory, self.table, hello.restart, self.gaps)
        self.rank_tree: RankTree | None = None
        self.global_writers: Writers | None = None
        if hello.position is not None:
            self._join(hello.position)
        self.counters: dict[str, Any] = {}
        self.step = hello.start_step - 1
        self.records = 0
        self.restart = hello.restart
        self.time = 0.0
        self.newest: Callable[[], tuple[int, float] | None] = lambda: None
        self.findings = Findings(self.directory, self.table, self.overflow, hello.own_name)
        self.book = IncidentBook(
            self.incidents, self.table, self._tell_trainers, self._write_incident, self._alert, self._reached
        )
        self._told_incident: int | None = None
        self.graph: dict[str, Any] = {}
        self.run: dict[str, Any] = {}
        self._home = DirectoryWatch(self.directory)
        self._kept: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)
        self._status_at = self._looked_at = self._renewed_at = -math.inf
        self._blind: str | None = None
        self._hang = HangReport(self.directory)
        self.metrics: MetricsSink | None = None
        if hello.prometheus is not None:
            metrics = Metrics(hello.prometheus, self.root, first=hello.rank == 0)
            self.metrics = MetricsSink(metrics, self.gaps, hello.max_wait, hello.start_step)

    def _join(self, position: TreePosition) -> None:
        """Take this rank's place among the others."""
        self.rank_tree = RankTree(position, self, self.hello.max_wait)
        if self.rank_tree.is_root and self.rank_tree.assembly is not None:
            directory = self.root / "global"
            restart = max(next_restart(directory), self.hello.restart)
            table = self.rank_tree.assembly.table
            self.global_writers = Writers(self.hello, directory, table, restart, self.gaps)

    @property
    def is_root(self) -> bool:
        """Whether incidents are made here: on a single rank, at the root of several, on one that is cut off."""
        return self.rank_tree is None or self.rank_tree.is_root or self.rank_tree.alone

    # ------------------------------------------------------------------ records

    def take_record(self, record: StepRecord) -> None:
        """Judge a record first, so that the trainer hears of trouble soon; then write it."""
        self.step, self.records = max(self.step, record.step), self.records + 1
        self.time = record.time
        found = self._judge(record)
        if record.examined and self.is_root:
            self.send({"type": messages.EXAMINED, "step": record.step})
        self.writers.write(record)
        if self.hello.quiet:
            self._kept.append(record)
        if self.rank_tree is not None:
            self.rank_tree.take_own(record)
            self.rank_tree.pump()
        checks_overflow = self.hello.overflow_check or (
            self.hello.overflow_check_on_incident and self.current_id is not None
        )
        for path, lines in self.findings.take(
            record, found, self.current_id, self.restart, checks_overflow=checks_overflow
        ):
            self._write_own(lambda p=path, x=lines: append_lines(p, x), record.step)  # type: ignore[misc]
        self.journal.settle()
        if self.records % QUOTA_STEPS == 0:
            self._keep_quota()
        self.status_reporter.tell(self.sinks)
        self._renew_status()

    def _judge(self, record: StepRecord) -> list[Anomaly]:
        """Run the detectors; should they fail, records are still written."""
        if self._blind is not None:
            self.gaps.note(DETECTION, record.step, record.step, self._blind)
        if self.detection is None:
            return []
        try:
            found = self.detection.judge(record)
            self._follow(record, found)
        except Exception as error:  # noqa: BLE001 - the edge of detection
            self.detection, self._blind = None, f"{type(error).__name__}: {error}"
            self.failed(DETECTION, error, record.step)
            return []
        return found

    def failed(self, part: str, error: Exception, step: int) -> None:
        """Report a fault of ours to the trainer, whose log is where people look."""
        trace = "".join(traceback.format_exception(error))
        self.gaps.note(part, max(step, 0), max(step, 0), f"{type(error).__name__}: {error}")
        if part != DETECTION:  # which will judge nothing more
            self.gaps.end(part)
        self.send({"type": messages.FAILURE, "part": part, "message": trace, "step": step})

    def _follow(self, record: StepRecord, found: list[Anomaly]) -> None:
        """Update the incidents, or have the root do it, and tell the trainer what is new about them."""
        activations = bool(self.detection.facts.activation[record.ids].any()) if found and self.detection else False
        if not self.is_root and self.rank_tree is not None:
            self.rank_tree.send_found(record, found, activations=activations)
            return
        self.book.observe(found, record.step, activations=activations)
        self.book.settle(record)

    def take_found(self, found: list[Anomaly], step: int, *, activations: bool) -> None:
        """Take anomalies of another rank."""
        self.book.observe(found, step, activations=activations)

    def take_parted(self, found: list[Anomaly], step: int) -> None:
        """Take what only the comparison of ranks shows: it is written here, for no rank has it."""
        self.take_found(found, step, activations=False)
        self.findings.anomalies += len(found)
        lines = [{**a.to_json(), "restart": self.restart} for a in found]
        self.journal.submit(lambda: append_lines(self.own_file("anomalies.jsonl"), lines), step)

    def look_around(self) -> None:
        """Do, once a second, what no record sets off: tell of sinks, keep the claim, look for a step that hangs."""
        now = time.monotonic()
        if now - self._looked_at < STATUS_SECONDS:
            return
        self._looked_at = now
        self.status_reporter.tell(self.sinks)
        self._write_own(lambda: self._home.look(lambda: rewrite_removed_files(self)), self.step)
        if now - self._renewed_at >= RENEW_SECONDS:
            self._renewed_at = now
            self.journal.submit(lambda: renew(self.hello.claim), self.step)
        if self.is_root and self.detection is not None:
            self._look_for_hang()

    def _look_for_hang(self) -> None:
        """Make an incident of a step that does not end, for the training process cannot say it."""
        found = self._hang.news()
        if found is not None:
            self.take_parted([found], found.step)
            self.settle_all()

    def _reached(self) -> int | None:
        """Up to which step every rank has been heard, or is not waited for any more; None where there is one."""
        assembly = None if self.rank_tree is None else self.rank_tree.assembly
        return None if assembly is None else max(assembly.done, self.step - PENDING_STEPS)

    def _tell_trainers(self, message: dict[str, Any]) -> None:
        """Tell this rank's trainer, and from the root all others."""
        self.send(message)
        if self.rank_tree is not None and self.is_root:
            self.rank_tree.tell_all(message)

    @property
    def current_id(self) -> int | None:
        """The id of the open incident, as far as it is known here."""
        return self.incidents.current_id if self.is_root else self._told_incident

    def take_action(self, message: dict[str, Any]) -> None:
        """Write down what was done about an incident, or have the root do it."""
        if not self.is_root and self.rank_tree is not None:
            self.rank_tree.tell_root(message)
            return
        self.book.add_action(message["incident"], message["action"])

    def take_from_root(self, message: dict[str, Any]) -> None:
        """Pass on what the root says to this rank's trainer, unless it is for another's."""
        if message.get("for", self.hello.rank) != self.hello.rank:
            return
        if message["type"] == messages.INCIDENT:
            self._told_incident = message["incident"]["id"]
            if self.hello.quiet and message["incident"]["rank"] == self.hello.rank:
                self._speak_up()
        self.send(message)

    def _speak_up(self) -> None:
        """Write this rank's own files from here on, and what was kept of the last steps: it is suspected."""
        claim = claim_start(self.directory, self.hello.restart)
        self.restart = claim.restart
        self.hello = replace(self.hello, quiet=False, restart=claim.restart, claim=claim.to_json(), beside=claim.beside)
        self.writers = Writers(self.hello, self.directory, self.table, self.hello.restart, self.gaps)
        for record in self._kept:
            self.writers.write(record)
        self._kept.clear()
        graph = self.graph
        self._write_own(lambda: replace_json(self.own_file("graph.json"), graph), self.step)
        self._renew_status("running")

    def write_global(self, record: StepRecord) -> None:
        """Write statistics of whole tensors."""
        if self.global_writers is not None:
            self.global_writers.write(record)

    def _write_incident(self, incident: Incident) -> None:
        line = incident.to_json()
        self.journal.submit(lambda: append_lines(self.incidents_file, [line]), incident.last_seen)
        self.writers.write_incident(incident)

    def _alert(self, incident: Incident) -> None:
        if self.hello.webhook is not None and self.is_root:
            begin_alert(self.hello.webhook, str(self.root), incident.to_json())

    # ------------------------------------------------------------------ control

    def take_control(self, message: dict[str, Any]) -> bool:
        """Do what the trainer asks; return False when it was to close."""
        kind = message["type"]
        if kind == messages.COUNTERS:
            self.counters = message["counters"]
            self._renew_status()
            self._write_cost()
        elif kind == messages.SAMPLING:
            line = message["line"]
            self._write_own(lambda: append_lines(self.own_file("sampling.jsonl"), [line]), line["step"])
        elif kind == messages.GRAPH:
            self.graph = message["graph"]
            self._write_own(lambda: replace_json(self.own_file("graph.json"), message["graph"]), self.step)
        elif kind == messages.RUN:
            self.run = message["run"]
            self.journal.submit(lambda: write_run(self.run_file, message["run"]), self.step)
            self.writers.write_settings(message["run"], self.step)
        elif kind == messages.ACTION:
            self.take_action(message)
        elif kind == messages.DATA_PARALLEL and self.rank_tree is not None:
            self.rank_tree.note_data_parallel(message)
        elif kind == messages.GAP:
            gap = message["gap"]
            self.gaps.add(gap["sink"], gap["first_step"], gap["last_step"], gap["reason"])
        elif kind == messages.FLUSH:
            self.settle_all()
            if self.is_root or self.rank_tree is None:
                self.send({"type": messages.FLUSHED, "token": message["token"]})
            else:
                self.rank_tree.ask_flush(message["token"])
        elif kind == messages.STATE:
            state = self.detection.state() if self.detection is not None else None
            self.send({"type": messages.STATE, "state": state, "token": message["token"]})
        elif kind == messages.LOAD_STATE:
            self._load(message["state"], message["step"])
        return bool(kind != messages.CLOSE)

    def _write_cost(self) -> None:
        """Show the monitor's own cost beside what it records, in TensorBoard."""
        cost = self.counters["cost"]
        shown = {"monitor_share": cost["recent_share"], "monitor_seconds_a_step": cost["seconds_a_step"]}
        self.writers.write_scalars(self.step, shown)

    def _load(self, state: dict[str, Any] | None, step: int) -> None:
        """Go on from a checkpoint: with its detectors' state, and in new files when the steps go back."""
        if self.detection is not None and state:
            self.detection.load(state)
        if step > self.step:
            return
        self.incidents.close_current()
        self.overflow.go_back()
        self.step = step - 1
        if self.rank_tree is not None:
            self.rank_tree.go_back(step)
            if self.global_writers is not None:
                self.global_writers.roll_back(step)
        self.restart = self.writers.roll_back(step)

    def close(self, state: str) -> None:
        """Write what is still to be written. `state` says how the run ended, for `status.json`."""
        self.settle_all()
        if self.rank_tree is not None:
            self.rank_tree.close()
            self.settle_all()
        self._keep_quota()
        for writers in (self.writers, self.global_writers):
            if writers is not None:
                writers.close(self.step)
        if self.metrics is not None:
            self.metrics.sink.close(LAST_SECONDS)
        self._renew_status(state)
        self.journal.submit(lambda: release(self.hello.claim), self.step, last=True)
        self.journal.close()
        self.status_reporter.tell(self.sinks)
        self.status_reporter.tell_end(self.files)

    def settle_all(self) -> None:
        """Bring every incident to its end: what is known of it by now is written and told."""
        self.book.settle_all()
        self._renew_status("running")
        self.journal.settle()

    # ------------------------------------------------------------------ status

    @property
    def files(self) -> list[WriterThread]:
        """Every place where records are written here."""
        others = self.global_writers.sinks if self.global_writers is not None else []
        return [*self.writers.sinks, *others, self.journal]

    @property
    def sinks(self) -> list[WriterThread]:
        """Those, and the metrics."""
        return self.files if self.metrics is None else [*self.files, self.metrics.sink]

    def own_file(self, name: str) -> Path:
        """Return the path of a file of this rank."""
        return self.directory / self.hello.own_name(name)

    def _keep_quota(self) -> None:
        for work in quota_works(self):
            self.journal.submit(work, self.step)

    def _renew_status(self, state: str | None = None) -> None:
        now = time.monotonic()
        if state is None and now - self._status_at < STATUS_SECONDS:
            return
        self._status_at = now
        if self.metrics is not None:
            self.metrics.renew(self.step, now=state is not None)
        data = status_of(self, state or "running")
        self._write_own(lambda: replace_json(self.own_file("status.json"), data), self.step, last=state is not None)

    def _write_own(self, work: Callable[[], None], step: int, *, last: bool = False) -> None:
        """Have a file of this rank written, unless it is one of many that keep quiet."""
        if not self.hello.quiet:
            self.journal.submit(work, step, last=last)
