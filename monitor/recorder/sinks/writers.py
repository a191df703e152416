"""The exporters that write a directory's records, each in its own thread: one that hangs or fails affects no other."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from trainsentry.anomaly.incident import Incident
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.exporters.exporter import (
    Exporter,
    ExporterEntry,
    IncidentExporter,
    OpeningExporter,
    RestartingExporter,
    ScalarExporter,
    SettingsExporter,
)
from trainsentry.exporters.registry import make_exporter
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.sinks.gaps import Gaps

Job = Callable[[], object]

KEPT_BYTES: Final = 16 * 2**20
"""Bytes of writes kept for a sink that cannot write: the size of the ring, some minutes of a usual run."""

JOB_BYTES: Final = 2**10
"""Bytes that a write takes in addition to its record: objects, and a line of JSON."""

FIRST_PAUSE: Final = 0.1
"""Seconds before the first retry of a failed write; each further pause is twice as long."""

MAX_PAUSE: Final = 5.0
"""Seconds between retries at most, so that a disk with room again is noticed soon."""

MAX_FAULTS: Final = 3
"""Consecutive faults of a writer (not of the file system) after which its sink is off for a while."""

OFF_SECONDS, MAX_OFF_SECONDS = 60.0, 3600.0
"""Seconds that a sink is off: twice as long each time that it fails again at once, up to an hour."""

LAST_SECONDS: Final = 1.0
"""Seconds to wait at the end for a sink that is failing."""

FINISH_SECONDS: Final = 30.0
"""Seconds that the remaining writes may take at the end: 16 MB of rows take a few seconds."""

MAX_REPORTED: Final = 5
"""Troubles of one sink that are reported; a disk that fills up every minute must not flood the log."""


@dataclass(frozen=True)
class SinkEvent:
    """A change of a sink: it has `trouble` and retries, it `goes_on` again, or it is `off` for a while."""

    kind: Literal["trouble", "goes_on", "off"]
    reason: str
    step: int


@dataclass(frozen=True)
class _Write:
    job: Job
    step: int
    size: int


class WriterThread:
    """The thread of one sink.

    `submit` queues a write, `settle` waits for the queue, at most `max_wait` seconds per trouble. A write that raises
    `OSError` is retried, and later writes wait in the queue, up to `kept_bytes`. Writes that do not fit are a gap. Any
    other exception is a fault of the writer: its record is left out, and after `MAX_FAULTS` consecutive faults the sink
    is off for `OFF_SECONDS`; then the next write tries it again. `settle` never waits for a sink that is not `patient`.
    """

    def __init__(
        self,
        name: str,
        gaps: Gaps,
        max_wait: float,
        *,
        patient: bool = True,
        kept_bytes: int = KEPT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.gaps = gaps
        self.max_wait = max_wait
        self.patient = patient
        self.kept_bytes = kept_bytes
        self.off: str | None = None
        self.trouble: str | None = None
        self.written = 0
        self._clock = clock
        self._writes: deque[_Write] = deque()
        self._held = 0
        self._began: float | None = None
        self._failing = self._closing = self._refusing = False
        self._faults = self._reported = self._times_off = 0
        self._off_seconds, self._back_at = OFF_SECONDS, 0.0
        self._events: list[SinkEvent] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._work, name=f"trainsentry-{name}", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # no threads at interpreter exit: submit writes directly
            self._thread = None

    @property
    def state(self) -> str:
        """The sink's state for `status.json`."""
        with self._changed:
            if self.off is None and self.trouble is not None:
                return f"{self.trouble}; retrying, with {counted(len(self._writes), 'write')} in the queue"
            return self.off or "writing"

    @property
    def is_busy(self) -> bool:
        """Whether the queue holds writes."""
        with self._changed:
            return bool(self._writes)

    def take_events(self) -> list[SinkEvent]:
        """Return the events since the last call."""
        with self._changed:
            events, self._events = self._events, []
        return events

    # ------------------------------------------------------------------ callers

    def submit(self, job: Job, step: int, size: int = 0, *, last: bool = False) -> None:
        """Queue a write that belongs to `step` and holds `size` bytes; the `last` one is always accepted."""
        with self._changed:
            size += JOB_BYTES
            if self.off is not None and not self._closing and self._clock() >= self._back_at:
                self.off, self._faults = None, MAX_FAULTS - 1
            if self.off is not None or self._closing:
                self._note_gap(step, self.off or "it is closed")
            elif self._writes and self._held + size > self.kept_bytes and not last:
                self._refusing = True
                self._note_gap(step, self.trouble or "it is slower than the training")
            else:
                if self._refusing:
                    self._refusing = False
                    self.gaps.end(self.name)
                self._writes.append(_Write(job, step, size))
                self._held += size
                self._changed.notify_all()
        if self._thread is None:
            self._closing = True
            self._work()
            self._closing = False

    def settle(self) -> None:
        """Wait until the queue is empty, at most `max_wait` seconds for one write."""
        with self._changed:
            while self.patient and self._writes and not self._needs_no_wait():
                waited = 0.0 if self._began is None else self._clock() - self._began
                if waited >= self.max_wait:
                    self._failing = True
                    self._note_trouble(f"a write has not returned after {self.max_wait:g} s", self._writes[0].step)
                    return
                self._changed.wait(self.max_wait - waited)

    def close(self, seconds: float = FINISH_SECONDS) -> None:
        """Write the queue for at most `seconds`, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(LAST_SECONDS if self._failing else seconds)
        with self._changed:
            self._drop_all(self.trouble or "the run ended before it was written")
            self.off = self.off or self.trouble

    def _needs_no_wait(self) -> bool:
        """Whether `settle` may return: the sink is off or failing, or is catching up and has room in its queue."""
        if self.off is not None or self._failing:
            return True
        return self.trouble is not None and self._held < self.kept_bytes // 2

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        pause = FIRST_PAUSE
        while (write := self._next()) is not None:
            try:
                write.job()
            except OSError as error:
                self._note_failure(f"{type(error).__name__}: {error}", write.step)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, pause)
                pause = min(2 * pause, MAX_PAUSE)
                continue
            except Exception as error:  # noqa: BLE001 - whatever a writer raises, the sink reports it
                self._note_fault(f"{type(error).__name__}: {error}", write.step)
            else:
                self._note_success()
            pause = FIRST_PAUSE

    def _next(self) -> _Write | None:
        """Return the oldest write, which stays in the queue until it is done; None when the thread can end."""
        with self._changed:
            self._changed.wait_for(lambda: self._writes or self._closing)
            if not self._writes:
                return None
            self._began = self._clock()
            return self._writes[0]

    def _note_success(self) -> None:
        with self._changed:
            self._remove_oldest()
            self.written += 1
            if self._faults:
                self._faults, self._off_seconds = 0, OFF_SECONDS
                self.gaps.end(self.name)
            self._failing = False
            if not self._writes and self.trouble is not None:
                self.trouble = None
                self._add_event("goes_on", "", -1)
            self._changed.notify_all()

    def _note_failure(self, reason: str, step: int) -> None:
        """Keep a write that failed with `OSError` for a retry; drop it when closing."""
        with self._changed:
            self._began = None
            self._failing = True
            self._note_trouble(reason, step)
            if self._closing:
                self._drop_all(reason)
            self._changed.notify_all()

    def _note_fault(self, reason: str, step: int) -> None:
        """Drop a write that failed by a fault of the writer."""
        with self._changed:
            self._remove_oldest()
            self._note_gap(step, reason)
            self._faults += 1
            if self._faults >= MAX_FAULTS:
                self.off = reason
                self._times_off += 1
                self._back_at = self._clock() + self._off_seconds
                self._off_seconds = min(2 * self._off_seconds, MAX_OFF_SECONDS)
                self._add_event("off", reason, step)
                self._drop_all(reason)
            else:
                self._note_trouble(reason, step)
            self._changed.notify_all()

    def _remove_oldest(self) -> None:
        if self._writes:  # empty if `close` has dropped the queue
            self._held -= self._writes.popleft().size
        self._began = None

    def _drop_all(self, reason: str) -> None:
        for write in self._writes:
            self._note_gap(write.step, reason)
        self._writes.clear()
        self._held = 0

    def _note_gap(self, step: int, reason: str) -> None:
        self.gaps.note(self.name, step, step, reason)

    def _note_trouble(self, reason: str, step: int) -> None:
        if self.trouble is None:
            self._reported += 1
            self._add_event("trouble", reason, step)
        self.trouble = reason

    def _add_event(self, kind: Literal["trouble", "goes_on", "off"], reason: str, step: int) -> None:
        if (self._times_off if kind == "off" else self._reported) <= MAX_REPORTED:
            self._events.append(SinkEvent(kind, reason, step))


LOG_SECONDS: Final = 45.0
"""Seconds that closing an exporter that is not patient may take: it sends its queue, and some libraries upload
files."""

GLOBAL: Final = "global"
"""The folder of the statistics over all ranks."""


class Writers:
    """Writes records to `directory` with every exporter that the configuration switches on.

    Records that an exporter does not write become one of the `gaps`. `restart` is the number of this start in the
    directory.
    """

    def __init__(
        self, settings: RecorderSettings, directory: Path, table: SeriesTable, restart: int, gaps: Gaps
    ) -> None:
        self.restart = restart
        self.directory = directory
        self.table = table
        self.gaps = gaps
        self.exporters: list[tuple[WriterThread, Exporter]] = []
        self._blocks: dict[str, Any] = {}
        self.adopt(settings, settings.start_step)

    def adopt(self, settings: RecorderSettings, step: int) -> None:
        """Begin the exporters that are switched on, and end those that are switched off or have other settings."""
        wanted = {} if settings.quiet else dict(self._wanted(settings))
        blocks = {name: block for name, (_, block) in wanted.items()}
        for sink, exporter in list(self.exporters):
            if sink.name not in blocks or blocks[sink.name] != self._blocks[sink.name]:
                self.exporters.remove((sink, exporter))
                _end(sink, exporter, step)
        running = {sink.name for sink, _ in self.exporters}
        for name, (entry, block) in wanted.items():
            if name not in running:
                self._begin(name, entry, block, settings)
        self._blocks = blocks

    def _wanted(self, settings: RecorderSettings) -> Iterator[tuple[str, tuple[ExporterEntry, Any]]]:
        """Yield the exporters that run here, each with its name and its block."""
        is_global = self.directory.name == GLOBAL
        for entry, block in settings.exporters_at("record"):
            if _runs(entry, settings.rank, is_global=is_global):
                yield f"global {entry.key}" if is_global else entry.key, (entry, block)

    def _begin(self, name: str, entry: ExporterEntry, block: Any, settings: RecorderSettings) -> None:
        place = settings.place(self.directory, self.table, self.restart, *self.gaps.callbacks(name))
        exporter: Exporter = make_exporter(entry, block, place)
        sink = WriterThread(name, self.gaps, settings.max_wait, patient=entry.patient)
        if isinstance(exporter, OpeningExporter):
            sink.submit(exporter.open, settings.start_step)
        self.exporters.append((sink, exporter))

    @property
    def sinks(self) -> list[WriterThread]:
        """The threads of the exporters."""
        return [sink for sink, _ in self.exporters]

    def write(self, record: StepRecord) -> None:
        """Write a record with every exporter."""
        for sink, exporter in self.exporters:
            sink.submit(partial(exporter.write, record), record.step, record.nbytes)
        for sink, _ in self.exporters:
            sink.settle()

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write numbers that belong to no record, with the exporters that show them."""
        for sink, exporter in self.exporters:
            if isinstance(exporter, ScalarExporter):
                _do(sink, partial(exporter.write_scalars, step, scalars), step)

    def write_incident(self, incident: Incident) -> None:
        """Write an incident with the exporters that show incidents."""
        for sink, exporter in self.exporters:
            if isinstance(exporter, IncidentExporter):
                _do(sink, partial(exporter.write_incident, incident), incident.last_seen)

    def write_settings(self, run: Mapping[str, Any], step: int) -> None:
        """Write the content of `run.json` with the exporters that show it."""
        for sink, exporter in self.exporters:
            if isinstance(exporter, SettingsExporter):
                _do(sink, partial(exporter.write_settings, run), step)

    def roll_back(self, step: int) -> int:
        """Continue from an earlier step in new files; return the number of the start that they carry."""
        for sink, exporter in self.exporters:
            if isinstance(exporter, RestartingExporter):
                _do(sink, partial(exporter.roll_back, step), step)
                self.restart = max(self.restart, exporter.restart)
        return self.restart

    def close(self, step: int) -> None:
        """Close every exporter."""
        for sink, exporter in self.exporters:
            _end(sink, exporter, step)


def _end(sink: WriterThread, exporter: Exporter, step: int) -> None:
    sink.submit(exporter.close, step, last=True)
    sink.close(FINISH_SECONDS if sink.patient else LOG_SECONDS)


def _runs(entry: ExporterEntry, rank: int, *, is_global: bool) -> bool:
    """Return whether an exporter writes the records of a directory: `global`, or a rank's own."""
    if is_global:
        return "global" in entry.places
    return "rank" in entry.places or (rank == 0 and "rank 0" in entry.places)


def _do(sink: WriterThread, job: Callable[[], object], step: int) -> None:
    sink.submit(job, step)
    sink.settle()
