"""Turns finished rows into step records without blocking, and keeps the newest ones (the flight recorder)."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainsentry.collectors.backend import ModelWatch
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import FOUND_INF, Series, SeriesTable
from trainsentry.collectors.shared.host_rows import PendingRows
from trainsentry.collectors.statistics import VALUE
from trainsentry.monitor.recorder.link import RecorderLink

_FOUND_INF: Final = Series(FOUND_INF, FOUND_INF, scalar=True)


@dataclass(frozen=True)
class _Pending:
    """Rows of a step that may still be on the device; `judged` is True once the overflow rule has seen them."""

    rows: PendingRows
    step: int
    first_order: int
    skipped: bool
    judged: bool


class Outbox:
    """Builds a record of each step's rows, sends it to the recorder, and keeps the newest records.

    `records` holds at most `keep_bytes` of memory, and always the newest record. `judged` is True once the
    open step was judged before its update.
    """

    def __init__(self, link: RecorderLink, table: SeriesTable, rank: int, *, keep_bytes: int) -> None:
        self.link = link
        self.table = table
        self.rank = rank
        self.keep_bytes = keep_bytes
        self.records: deque[StepRecord] = deque()
        self.held_bytes = 0
        self.judged = False
        self._peeked: tuple[int, StepRecord | None] = (0, None)
        self._pending: deque[_Pending | StepRecord] = deque()

    def begin_step(self) -> None:
        """Forget the record of the last step."""
        self._peeked, self.judged = (0, None), False

    def peek(self, watch: ModelWatch, step: int, first_order: int, *, skipped: bool) -> StepRecord:
        """Return the record of the open step's rows so far; `end_step` keeps it if no row follows."""
        record = self._build(watch.rows.peek(), step, first_order, skipped=skipped)
        self._peeked, self.judged = (len(watch.rows), record), True
        return record

    def send_part(self, watch: ModelWatch, step: int, first_order: int, *, skipped: bool, examined: bool) -> StepRecord:
        """Wait for the open step's rows so far, send them as a record of their own, and return it."""
        record = self._build(watch.take(), step, first_order, skipped=skipped, examined=examined)
        self._peeked = (0, None)
        self.send(record)
        return record

    def end_step(self, watch: ModelWatch, step: int, first_order: int, *, skipped: bool) -> None:
        """Queue the rows of a step that has ended; a device may still be copying them."""
        rows, record = self._peeked
        if record is not None and rows == len(watch.rows):  # the update added no row to the record
            watch.rows.drop()
            self._pending.append(record)
        elif len(watch.rows):
            self._pending.append(_Pending(watch.take(), step, first_order, skipped, self.judged))

    def arrived(self, *, wait: bool) -> Iterator[tuple[StepRecord, bool]]:
        """Yield the records whose rows have arrived, in order, and whether each was judged; with `wait`, all."""
        while self._pending:
            first = self._pending[0]
            if isinstance(first, StepRecord):
                found = first, True
            elif wait or first.rows.ready():
                found = self._build(first.rows, first.step, first.first_order, skipped=first.skipped), first.judged
            else:
                return
            self._pending.popleft()  # before the yield, so that a Ctrl-C there does not yield it twice
            yield found

    def _build(
        self, rows: PendingRows, step: int, first_order: int, *, skipped: bool, examined: bool = False
    ) -> StepRecord:
        """Wait for the copy of rows, and return their record.

        A row with `found_inf` above 0 means that a fused optimizer skipped the update.
        """
        rows.wait()
        ids, layouts, values = rows.resolve()
        found_inf = self.table.known_id(_FOUND_INF)
        skipped = skipped or (found_inf is not None and bool(np.any(values[ids == found_inf, VALUE] > 0)))
        return StepRecord(
            step,
            self.rank,
            ids,
            layouts,
            values,
            first_order,
            skipped,
            examined,
            time=time.time(),
            overwritten=rows.overwritten,
            histograms=rows.find_histograms(),
        )

    def send(self, record: StepRecord) -> None:
        """Send a record to the recorder, and keep it among the newest records."""
        record.forget_columns()
        self.records.append(record)
        self.held_bytes += record.memory_bytes
        while self.held_bytes > self.keep_bytes and len(self.records) > 1:
            self.held_bytes -= self.records.popleft().memory_bytes
        self.link.send_record(record)
