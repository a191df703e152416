"""Rows on their way to the recorder: waited for without waiting, made into records, kept for a while."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import FOUND_INF, Series, SeriesTable
from trainsentry.collectors.statistics import VALUE
from trainsentry.monitor.recorder.link import RecorderLink

_FOUND_INF: Final = Series(FOUND_INF, FOUND_INF, scalar=True)


@dataclass(frozen=True)
class _Pending:
    """Rows of a step that may still be on the device; `judged` says that the overflow rule has seen them."""

    rows: Any
    step: int
    first_order: int
    skipped: bool
    judged: bool


class Outbox:
    """Makes records of rows, hands them to the recorder, and keeps the last ones: the flight recorder.

    `recorded` holds at most `keep_bytes` of memory, and always the newest record.
    """

    def __init__(self, link: RecorderLink, table: SeriesTable, rank: int, *, keep_bytes: int) -> None:
        self.link = link
        self.table = table
        self.rank = rank
        self.keep_bytes = keep_bytes
        self.recorded: deque[StepRecord] = deque()
        self.recorded_bytes = 0
        self._pending: deque[_Pending | StepRecord] = deque()

    def await_rows(self, rows: Any, step: int, first_order: int, *, skipped: bool, judged: bool) -> None:
        """Take the rows of a step that has ended; their copy to the host may be under way."""
        self._pending.append(_Pending(rows, step, first_order, skipped, judged))

    def await_record(self, record: StepRecord) -> None:
        """Take the record of a step that has ended and was judged; it goes behind those whose rows are under way."""
        self._pending.append(record)

    def arrived(self, *, wait: bool) -> Iterator[tuple[StepRecord, bool]]:
        """Yield the records whose rows have arrived, in order, and whether each was judged; with `wait`, all."""
        while self._pending:
            first = self._pending[0]
            if isinstance(first, StepRecord):
                found = first, True
            elif wait or first.rows.ready():
                found = self.build(first.rows, first.step, first.first_order, skipped=first.skipped), first.judged
            else:
                return
            self._pending.popleft()  # before it is given away: a Ctrl-C there must not give it away twice
            yield found

    def build(self, rows: Any, step: int, first_order: int, *, skipped: bool, examined: bool = False) -> StepRecord:
        """Return the record of rows, whose copy is waited for.

        A fused optimizer that was told to skip says so in a row of its own.
        """
        rows.wait()
        ids, layouts, values = rows.resolve()
        told = self.table.known_id(_FOUND_INF)
        skipped = skipped or (told is not None and bool(np.any(values[ids == told, VALUE] > 0)))
        return StepRecord(step, self.rank, ids, layouts, values, first_order, skipped, examined, time.time())

    def hand_over(self, record: StepRecord) -> None:
        """Send a record to the recorder and keep it for a while."""
        record.forget_columns()
        self.recorded.append(record)
        self.recorded_bytes += record.held_bytes
        while self.recorded_bytes > self.keep_bytes and len(self.recorded) > 1:
            self.recorded_bytes -= self.recorded.popleft().held_bytes
        self.link.send_record(record)
