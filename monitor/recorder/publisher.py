"""Publishes what a step showed: anomalies and overflows on disk, incidents on disk and to the trainers."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.incidents.incident_log import IncidentLog
from trainsentry.anomaly.overflow import OverflowRule
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import PARAMETER, SeriesTable
from trainsentry.exporters.files.foreign_files import read_lines
from trainsentry.monitor.recorder import messages

MAX_ANOMALY_LINES: Final = 5_000
"""Lines of `anomalies.jsonl` for one incident (about 1.7 MB); what comes after is counted, not written."""

MAX_OVERFLOW_LINES: Final = 1_000
"""Steps written whole to `overflow.jsonl` (about 1 MB); of later ones every hundredth is."""

MAX_OVERFLOW_NAMES: Final = 32
"""Names written of one step's overflowing series; their number is written in any case."""


class Findings:
    """Counts what is found and makes the lines that are to be written of it; `named` gives the files their names."""

    def __init__(
        self, directory: Path, table: SeriesTable, overflow: OverflowRule, named: Callable[[str], str]
    ) -> None:
        self._anomalies = directory / named("anomalies.jsonl")
        self._overflows = directory / named("overflow.jsonl")
        self.table = table
        self.overflow = overflow
        self.anomalies = 0
        self._lines = 0
        self._lines_of: int | None = None

    def take(
        self, record: StepRecord, found: list[Anomaly], incident_id: int | None, restart: int, *, checks_overflow: bool
    ) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
        """Yield the lines to append, each list with its file."""
        if incident_id != self._lines_of:
            self._lines_of, self._lines = incident_id, 0
        room = max(MAX_ANOMALY_LINES - self._lines, 0)
        lines = [{**a.to_json(), "restart": restart} for a in found[:room]]
        self.anomalies += len(found)
        self._lines += len(lines)
        if lines:
            yield self._anomalies, lines
        overflow = self.overflow.judge(record)
        often = self.overflow.count + self.overflow.skipped
        if overflow is not None and checks_overflow and (often <= MAX_OVERFLOW_LINES or often % 100 == 0):
            series = [self.table.series[i] for i in record.ids[overflow.rows[:MAX_OVERFLOW_NAMES]]]
            line = {
                "step": record.step,
                "skipped": record.skipped,
                "count": self.overflow.count,
                "series": len(overflow.rows),
                "names": [[s.quantity, s.name, s.micro_step] for s in series],
            }
            yield self._overflows, [line]


SETTLED_AFTER: Final = 2
"""Records after which an incident's ranking stands even when no weight was read meanwhile."""


class IncidentBook:
    """Follows the incidents, tells the trainers what is new (`tell`), and has each change written (`write`).

    `alert` hears of each incident once, when it has settled. `reached` says up to which step every rank has been heard.

    An incident has settled when the weights were read since the trouble began. Settled ones are numbered from 1 on,
    in the order in which they settled: by that number several ranks know which of them they have heard of.
    """

    def __init__(
        self,
        log: IncidentLog,
        table: SeriesTable,
        tell: Callable[[dict[str, Any]], None],
        write: Callable[[Incident], None],
        alert: Callable[[Incident], None] = lambda _: None,
        reached: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.log = log
        self.table = table
        self._tell_trainers = tell
        self._write = write
        self._alert = alert
        self._reached = reached
        self._since: dict[int, int] = {}
        self._settled: dict[int, int] = {}
        self._written: dict[int, Incident] = {}

    def observe(self, found: Sequence[Anomaly], step: int, *, activations: bool) -> None:
        """Take the anomalies of a step, of whichever rank."""
        changed = self.log.observe(step, found, activations=activations, reached=self._reached())
        if found and not self.log.is_open:
            self._tell_trainers({"type": messages.SUSPICION, "step": step})
        if changed is not None:
            self._since.setdefault(changed.id, 0)
            self._tell(changed)

    def settle(self, record: StepRecord) -> None:
        """Settle the incidents that a record brings to that point."""
        for incident_id in [i for i in self._since if i not in self._settled]:
            self._since[incident_id] += 1
            waited = self._since[incident_id] > SETTLED_AFTER
            if (
                waited
                or record.examined
                or any(self.table.series[i].quantity == PARAMETER for i in record.ids.tolist())
            ):
                self._settle(self.log.incidents[incident_id])

    def settle_all(self) -> None:
        """Settle every incident, and write what is known of each."""
        for incident in self.log.incidents.values():
            if incident.id not in self._settled:
                self._settle(incident)
            self._write_changed(incident)

    def add_action(self, incident_id: int, action: str) -> None:
        """Note what was done about an incident."""
        changed = self.log.add_action(incident_id, action)
        if changed is not None:
            self._tell(changed)

    def _settle(self, incident: Incident) -> None:
        self._settled[incident.id] = len(self._settled) + 1
        self._tell(incident)
        self._alert(incident)

    def _tell(self, incident: Incident) -> None:
        settled = self._settled.get(incident.id, 0)
        self._tell_trainers({"type": messages.INCIDENT, "incident": incident.to_json(), "settled": settled})
        self._write_changed(incident)

    def _write_changed(self, incident: Incident) -> None:
        if self._written.get(incident.id) != incident:
            self._written[incident.id] = incident
            self._write(incident)


IDS_OF_A_RANK: Final = 1_000_000
"""Ids that each rank has for itself where ranks share a file without knowing of each other."""


def next_incident_id(path: Path, rank_alone: int = 0) -> int:
    """Return the id for the next incident of a directory: one more than any that stands in its file.

    Of ranks that do not know of each other, each has ids of its own (`rank_alone` counts them).
    """
    first = rank_alone * IDS_OF_A_RANK
    if not path.is_file():
        return first + 1
    ids = [line.get("id") for _, line in read_lines(path, lambda *_: None)]
    return 1 + max((i for i in ids if isinstance(i, int) and first <= i < first + IDS_OF_A_RANK), default=first)
