"""What a record's anomalies and overflows become in `anomalies.jsonl` and `overflow.jsonl`, within bounds."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.overflow import OverflowRule
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable

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
