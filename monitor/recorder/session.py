"""One rank's recording: takes records in, judges them, writes them, and tells the trainer what it found."""

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.incident_log import QUIET_STEPS, IncidentLog
from trainsentry.anomaly.overflow import OverflowRule
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import PARAMETER, SeriesTable
from trainsentry.exporters.csv_writer import CsvWriter
from trainsentry.exporters.exporter import Exporter, ScalarExporter
from trainsentry.exporters.json_files import append_lines, read_lines, replace_json
from trainsentry.exporters.quota import enforce_quota
from trainsentry.exporters.run_file import write_run
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.findings import Findings
from trainsentry.monitor.recorder.hello import Hello
from trainsentry.monitor.recorder.sink import Sink
from trainsentry.monitor.recorder.status import status_of

STATUS_SECONDS: Final = 1.0
"""How often `status.json` is renewed: often enough for a person, seldom enough for a shared file system."""

JOURNAL: Final = "journal"
"""The sink of everything that is no table: incidents, anomalies, overflows, status, graph."""

QUOTA_STEPS: Final = 100
"""Records between two looks at the disk quota."""

SETTLED_AFTER: Final = 2
"""Records after which an incident's ranking stands even when no weight was read meanwhile."""


class Session:
    """Everything that happens behind the ring. `send` carries messages to the trainer and never blocks."""

    def __init__(self, hello: Hello, send: Callable[[dict[str, Any]], None]) -> None:
        self.hello = hello
        self.send = send
        self.table = SeriesTable()
        if hello.definitions:
            self.table.define(hello.definitions)
        self.root = Path(hello.output_dir)
        self.directory = self.root / f"rank{hello.rank}"
        self.detection = Detection(self.table) if hello.detect else None
        self.incidents = IncidentLog(
            self.table, next_incident_id(self.root / "incidents.jsonl"), max(QUIET_STEPS, 2 * hello.slowest_every)
        )
        self.overflow = OverflowRule(self.table)
        self.journal = Sink(JOURNAL, hello.max_wait, self._sink_failed)
        self.exporters: list[tuple[Sink, Exporter]] = self._make_exporters()
        self.counters: dict[str, Any] = {}
        self.gaps: list[dict[str, Any]] = []
        self.step = hello.start_step - 1
        self.records = 0
        self.restart = hello.restart
        self.findings = Findings(self.directory, self.table, self.overflow)
        self._since_incident: dict[int, int] = {}
        self._settled: set[int] = set()
        self._written: dict[int, Incident] = {}
        self._status_at = 0.0

    def _make_exporters(self) -> list[tuple[Sink, Exporter]]:
        made: list[tuple[str, Exporter]] = []
        if self.hello.csv_steps_per_file is not None:
            writer = CsvWriter(
                self.directory,
                self.table,
                self.hello.statistics,
                steps_per_file=self.hello.csv_steps_per_file,
                start_step=self.hello.start_step,
                restart=self.hello.restart,
            )
            made.append(("csv", writer))
        if self.hello.tensorboard:
            from trainsentry.exporters.tensorboard_writer import TensorBoardWriter

            directory = self.root / "tensorboard" / f"rank{self.hello.rank}"
            made.append(("tensorboard", TensorBoardWriter(directory, self.table, self.hello.statistics)))
        return [(Sink(name, self.hello.max_wait, self._sink_failed), exporter) for name, exporter in made]

    # ------------------------------------------------------------------ records

    def take_record(self, record: StepRecord) -> None:
        """Judge a record first, so that the trainer hears of trouble soon; then write it."""
        self.step, self.records = max(self.step, record.step), self.records + 1
        found = self._judge(record)
        if record.examined:
            self.send({"type": messages.EXAMINED, "step": record.step})
        for sink, exporter in self.exporters:
            sink.submit(lambda e=exporter: e.write(record), record.step)  # type: ignore[misc]
        checks_overflow = self.hello.overflow_check or (
            self.hello.overflow_check_on_incident and bool(self.incidents.incidents)
        )
        for path, lines in self.findings.take(
            record, found, self.incidents.current_id, self.restart, checks_overflow=checks_overflow
        ):
            self.journal.submit(lambda p=path, x=lines: append_lines(p, x), record.step)  # type: ignore[misc]
        for sink, _ in self.exporters:
            sink.settle()
        self.journal.settle()
        if self.records % QUOTA_STEPS == 0:
            self._keep_quota()
        self._renew_status()

    def _judge(self, record: StepRecord) -> list[Anomaly]:
        """Run the detectors; should they fail, records are still written."""
        if self.detection is None:
            return []
        try:
            found = self.detection.judge(record)
            self._follow(record, found)
        except Exception as error:  # noqa: BLE001 - the edge of detection
            self.detection = None
            self.failed("detection", error, record.step)
            return []
        return found

    def failed(self, part: str, error: Exception, step: int) -> None:
        """Report a fault of ours to the trainer, whose log is where people look."""
        trace = "".join(traceback.format_exception(error))
        self.gaps.append({"part": part, "from_step": step, "reason": f"{type(error).__name__}: {error}"})
        self.send({"type": messages.FAILURE, "part": part, "message": trace, "step": step})

    def _follow(self, record: StepRecord, found: list[Anomaly]) -> None:
        """Update the incidents and tell the trainer what is new about them."""
        activations = bool(self.detection.facts.activation[record.ids].any()) if found and self.detection else False
        changed = self.incidents.observe(record.step, found, activations=activations)
        if found and not self.incidents.is_open:
            self.send({"type": messages.SUSPICION, "step": record.step})
        if changed is not None:
            self._since_incident.setdefault(changed.id, 0)
        for incident_id in [i for i in self._since_incident if i not in self._settled]:
            if self._settles(incident_id, record):
                self._settled.add(incident_id)
                changed = self.incidents.incidents[incident_id]
        if changed is not None:
            self._tell(changed)

    def _settles(self, incident_id: int, record: StepRecord) -> bool:
        """Whether the weights have been read since the trouble began, or it has been waited for long enough."""
        self._since_incident[incident_id] += 1
        if record.examined or self._since_incident[incident_id] > SETTLED_AFTER:
            return True
        return any(self.table.series[i].quantity == PARAMETER for i in record.ids.tolist())

    def _tell(self, incident: Incident) -> None:
        self.send(
            {
                "type": messages.INCIDENT,
                "incident": incident.to_json(),
                "settled": incident.id in self._settled,
            }
        )
        self._write_incident(incident)

    def _write_incident(self, incident: Incident) -> None:
        if self._written.get(incident.id) == incident:
            return
        self._written[incident.id] = incident
        line = incident.to_json()
        self.journal.submit(lambda: append_lines(self.root / "incidents.jsonl", [line]), incident.last_seen)

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
            self.journal.submit(lambda: append_lines(self.directory / "sampling.jsonl", [line]), line["step"])
        elif kind == messages.GRAPH:
            self.journal.submit(lambda: replace_json(self.directory / "graph.json", message["graph"]), self.step)
        elif kind == messages.RUN:
            self.journal.submit(lambda: write_run(self.root / "run.json", message["run"]), self.step)
        elif kind == messages.ACTION:
            changed = self.incidents.add_action(message["incident"], message["action"])
            if changed is not None:
                self._tell(changed)
        elif kind == messages.GAP:
            self.gaps.append(message["gap"])
        elif kind == messages.FLUSH:
            self._settle_all()
            self.send({"type": messages.FLUSHED, "token": message["token"]})
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
        for sink, exporter in self.exporters:
            if isinstance(exporter, ScalarExporter):
                sink.submit(lambda e=exporter: e.write_scalars(self.step, shown), self.step)  # type: ignore[misc]
                sink.settle()

    def _load(self, state: dict[str, Any] | None, step: int) -> None:
        """Go on from a checkpoint: with its detectors' state, and in new files when the steps go back."""
        if self.detection is not None and state:
            self.detection.load(state)
        if step > self.step:
            return
        self.incidents.close_current()
        self.overflow.go_back()
        self.step = step - 1
        for sink, exporter in self.exporters:
            if isinstance(exporter, CsvWriter):
                sink.submit(lambda e=exporter: e.begin_again(step), step)  # type: ignore[misc]
                sink.settle()
                self.restart = exporter.restart

    def close(self, state: str) -> None:
        """Write what is still to be written. `state` says how the run ended, for `status.json`."""
        self._settle_all()
        self._keep_quota()
        self._renew_status(state)
        self.journal.settle()
        for sink, exporter in self.exporters:
            sink.submit(exporter.close, self.step)
            sink.settle()
            sink.close()
        self.journal.close()
        self.send({"type": messages.CLOSED})

    def _settle_all(self) -> None:
        for incident in self.incidents.incidents.values():
            if incident.id not in self._settled:
                self._settled.add(incident.id)
                self._tell(incident)
            self._write_incident(incident)
        self._renew_status("running")
        self.journal.settle()

    # ------------------------------------------------------------------ status

    def _sink_failed(self, name: str, message: str, step: int) -> None:
        self.gaps.append({"exporter": name, "from_step": step, "reason": message})
        self.send({"type": messages.FAILURE, "part": name, "message": message, "step": step})

    def _keep_quota(self) -> None:
        spared = [(i.first_seen, i.last_seen) for i in self.incidents.incidents.values()]
        events = self.root / "tensorboard" / f"rank{self.hello.rank}"
        step, restart = self.step, self.restart

        def enforce() -> None:
            enforce_quota(self.directory, self.hello.disk_quota, step, spared, restart=restart, events=events)

        self.journal.submit(enforce, step)

    def _renew_status(self, state: str | None = None) -> None:
        now = time.time()
        if state is None and now - self._status_at < STATUS_SECONDS:
            return
        self._status_at = now
        data = status_of(self, state or "running")
        self.journal.submit(lambda: replace_json(self.directory / "status.json", data), self.step)


def next_incident_id(path: Path) -> int:
    """Return the id for the next incident of a directory: one more than any that stands in its file."""
    if not path.is_file():
        return 1
    ids = [line.get("id") for _, line in read_lines(path, lambda *_: None)]
    return 1 + max((i for i in ids if isinstance(i, int)), default=0)
