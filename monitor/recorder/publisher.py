"""Turns anomalies into incidents, and publishes these to the trainers, the files and the alerts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.incident import NOTE, Incident
from trainsentry.anomaly.incidents.incident_log import QUIET_STEPS, IncidentLog
from trainsentry.anomaly.overflow import OverflowRule
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import PARAMETER, SeriesTable
from trainsentry.exporters.files.foreign_files import read_lines
from trainsentry.exporters.files.json_files import append_lines
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.ranks.rank_tree import RankTree
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.sinks.events import Alerts
from trainsentry.monitor.recorder.sinks.writers import Writers, WriterThread

SETTLED_AFTER: Final = 2
"""Records after which an incident settles even if no weight was read since it began."""

PUBLISHED_EVERY: Final = 1_000
"""Steps after which an incident that lasts without a change is published again, with the last step it was seen at."""

MAX_ANOMALY_LINES: Final = 5_000
"""Lines of `anomalies.jsonl` for one incident (about 1.7 MB); later anomalies are counted but not written."""

MAX_OVERFLOW_LINES: Final = 1_000
"""Steps written to `overflow.jsonl` one by one (about 1 MB); after that every hundredth step is written."""

MAX_OVERFLOW_NAMES: Final = 32
"""Names written for one step's overflowing series; their number is always written."""

IDS_OF_A_RANK: Final = 1_000_000
"""Incident ids reserved for each rank where several ranks write one file without a connection between them."""


class Recording(Protocol):
    """The parts of a session that publish an incident. `send` carries a message to this rank's trainer."""

    settings: RecorderSettings
    table: SeriesTable
    incidents_file: Path
    restart: int
    step: int
    rank_tree: RankTree | None
    journal: WriterThread
    writers: Writers
    alerts: Alerts
    send: Callable[[dict[str, Any]], None]

    @property
    def is_root(self) -> bool:
        """Whether incidents are made here."""

    def rank_file(self, name: str) -> Path:
        """Return the path of a file of this rank."""

    def write_rank_file(self, work: Callable[[], None], step: int, *, last: bool = False) -> None:
        """Write a file of this rank, unless the rank is quiet."""


@dataclass
class _Published:
    """What was published of one incident: when it was last seen, and its place in the order of settling, 0 before."""

    records: int = 0
    settled: int = 0
    last_seen: int = 0
    written: Incident | None = None


class IncidentPublisher:
    """Follows the incidents of a recording and publishes each change.

    Where the recorders of several ranks form a tree, the root makes the incidents and the others send it their
    anomalies. An incident settles, which makes its ranking final, once weights were read after it began. Settled
    incidents are numbered from 1 in the order of settling; ranks compare these numbers to find the incidents that all
    of them have received. Trainers act on settled incidents only.
    """

    def __init__(self, session: Recording) -> None:
        settings = session.settings
        rank_alone = settings.rank if settings.position is None else 0
        first_id = next_incident_id(session.incidents_file, rank_alone)
        self.session = session
        self.log = IncidentLog(session.table, first_id, max(QUIET_STEPS, 2 * settings.slowest_every))
        self.overflow = OverflowRule(session.table)
        self.anomalies = 0
        self._published: dict[int, _Published] = {}
        self._settled = 0
        self._open_at_root: int | None = None
        self._lines = 0
        self._lines_of: int | None = None

    @property
    def incidents(self) -> dict[int, Incident]:
        """The incidents made here, by id."""
        return self.log.incidents

    @property
    def open_id(self) -> int | None:
        """The id of the open incident, as far as this recorder knows it."""
        return self.log.current_id if self.session.is_root else self._open_at_root

    # ------------------------------------------------------------------ from anomalies to incidents

    def take(self, record: StepRecord, found: list[Anomaly], *, activations: bool) -> None:
        """Take the anomalies of this rank's record; a recorder below the root sends them up.

        `activations` says whether the record holds rows of activations.
        """
        if not self.session.is_root and self.session.rank_tree is not None:
            self.session.rank_tree.send_found(record, found, activations=activations)
            return
        self.observe(found, record.step, activations=activations)
        self._settle_by(record)

    def observe(self, found: Sequence[Anomaly], step: int, *, activations: bool) -> None:
        """Take the anomalies of one step of any rank; send the trainers a suspicion or a changed incident."""
        tree = self.session.rank_tree
        assembly = tree.assembly if tree is not None else None
        reached = assembly.heard_up_to(self.session.step) if assembly is not None else None
        changed = self.log.observe(step, found, activations=activations, reached=reached)
        if found and not self.log.is_open:
            self._send_to_trainers({"type": messages.SUSPICION, "step": step})
        if changed is not None:
            self._published.setdefault(changed.id, _Published())
            self._publish(changed)
        elif found and self.log.current_id is not None:
            self._publish_lasting(self.incidents[self.log.current_id])

    def _publish_lasting(self, incident: Incident) -> None:
        """Publish an incident that lasts, and has not changed for `PUBLISHED_EVERY` steps."""
        if incident.last_seen - self._published[incident.id].last_seen >= PUBLISHED_EVERY:
            self._publish(incident)

    def _settle_by(self, record: StepRecord) -> None:
        """Settle the incidents whose ranking is final with this record: it holds weights, or enough records passed."""
        series = self.session.table.series
        for incident_id, published in self._published.items():
            if published.settled or self.incidents[incident_id].severity == NOTE:
                continue  # a note wakes nobody and stops nothing
            published.records += 1
            waited = published.records > SETTLED_AFTER
            if waited or record.examined or any(series[i].quantity == PARAMETER for i in record.ids.tolist()):
                self._settle(self.incidents[incident_id])

    def settle_all(self) -> None:
        """Settle every incident and write its last state."""
        for incident in list(self.incidents.values()):
            if not self._published[incident.id].settled and incident.severity != NOTE:
                self._settle(incident)
            self._write(incident)

    def _settle(self, incident: Incident) -> None:
        self._settled += 1
        self._published[incident.id].settled = self._settled
        self._publish(incident)
        if self.session.is_root:
            self.session.alerts.send(incident.to_json(), incident.last_seen)

    # ------------------------------------------------------------------ to trainers and files

    def _publish(self, incident: Incident) -> None:
        published = self._published[incident.id]
        settled, published.last_seen = published.settled, incident.last_seen
        self._send_to_trainers({"type": messages.INCIDENT, "incident": incident.to_json(), "settled": settled})
        self._write(incident)

    def _send_to_trainers(self, message: dict[str, Any]) -> None:
        """Send a message to this rank's trainer and, from the root, to all others."""
        self.session.send(message)
        if self.session.rank_tree is not None and self.session.is_root:
            self.session.rank_tree.tell_all(message)

    def _write(self, incident: Incident) -> None:
        """Append an incident to `incidents.jsonl` and show it in the curves, if it changed since the last time."""
        published, session = self._published[incident.id], self.session
        if published.written == incident:
            return
        published.written = incident
        line = incident.to_json()
        session.journal.submit(lambda: append_lines(session.incidents_file, [line]), incident.last_seen)
        session.writers.write_incident(incident)

    def write_found(self, record: StepRecord, found: list[Anomaly]) -> None:
        """Append a record's anomalies to `anomalies.jsonl` and its overflow to `overflow.jsonl`."""
        session = self.session
        if self.open_id != self._lines_of:
            self._lines_of, self._lines = self.open_id, 0
        room = max(MAX_ANOMALY_LINES - self._lines, 0)
        lines = [{**a.to_json(), "restart": session.restart} for a in found[:room]]
        self.anomalies += len(found)
        self._lines += len(lines)
        if lines:
            session.write_rank_file(lambda: append_lines(session.rank_file("anomalies.jsonl"), lines), record.step)
        overflow = self._overflow_line(record)
        if overflow is not None:
            session.write_rank_file(lambda: append_lines(session.rank_file("overflow.jsonl"), [overflow]), record.step)

    def _overflow_line(self, record: StepRecord) -> dict[str, Any] | None:
        """Count a record's overflow; return its line of `overflow.jsonl`, or None if there is none to write."""
        overflow = self.overflow.judge(record)
        settings, count = self.session.settings, self.overflow.count + self.overflow.skipped
        checks = settings.checks_overflow(in_incident=self.open_id is not None)
        if overflow is None or not checks or (count > MAX_OVERFLOW_LINES and count % 100):
            return None
        series = [self.session.table.series[i] for i in record.ids[overflow.rows[:MAX_OVERFLOW_NAMES]]]
        return {
            "step": record.step,
            "skipped": record.skipped,
            "count": self.overflow.count,
            "series": len(overflow.rows),
            "names": [[s.quantity, s.name, s.micro_step] for s in series],
        }

    # ------------------------------------------------------------------ from other ranks and from the trainer

    def take_between_ranks(self, found: list[Anomaly], step: int) -> None:
        """Take anomalies that only the comparison of ranks shows; no rank writes them, so they are written here."""
        session = self.session
        self.observe(found, step, activations=False)
        self.anomalies += len(found)
        lines = [{**a.to_json(), "restart": session.restart} for a in found]
        session.journal.submit(lambda: append_lines(session.rank_file("anomalies.jsonl"), lines), step)

    def take_action(self, message: dict[str, Any]) -> None:
        """Add a trainer's action to an incident; a recorder below the root sends it up."""
        if not self.session.is_root and self.session.rank_tree is not None:
            self.session.rank_tree.up.message(message)
            return
        changed = self.log.add_action(message["incident"], message["action"])
        if changed is not None:
            self._publish(changed)

    def take_from_root(self, incident: dict[str, Any]) -> None:
        """Note the root's open incident; `incident` is its line."""
        self._open_at_root = incident["id"]

    def go_back(self) -> None:
        """Continue from an earlier step: new anomalies begin another incident."""
        self.log.go_back()
        self.overflow.go_back()


def next_incident_id(path: Path, rank_alone: int = 0) -> int:
    """Return the id for the next incident of a directory: one more than the largest in its file.

    Ranks without a connection between them use separate ranges of ids; `rank_alone` numbers the range.
    """
    first = rank_alone * IDS_OF_A_RANK
    if not path.is_file():
        return first + 1
    ids = [line.get("id") for _, line in read_lines(path, lambda *_: None)]
    return 1 + max((i for i in ids if isinstance(i, int) and first <= i < first + IDS_OF_A_RANK), default=first)
