"""Runs the writes to one place in a thread of their own, so that one that hangs or fails hurts nothing else."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from trainsentry.monitor.recorder.sinks.gaps import Gaps

Job = Callable[[], object]

KEPT_BYTES: Final = 16 * 2**20
"""Bytes of writes kept for a place that cannot be written: as many as the ring has, some minutes of a usual run."""

JOB_BYTES: Final = 2**10
"""Bytes that a write takes beside its record: objects, and a line of JSON."""

FIRST_PAUSE: Final = 0.1
"""Seconds before a write that failed is tried again; each pause is twice the one before."""

MAX_PAUSE: Final = 5.0
"""Longest of these pauses, in seconds: a disk that has room again is not left waiting for longer."""

MAX_FAULTS: Final = 3
"""Faults in a row, no matter of the file system, after which a writer is taken to be broken for good."""

LAST_SECONDS: Final = 1.0
"""How long a place that has not answered so far is waited for at the end."""

FINISH_SECONDS: Final = 30.0
"""How long the writes that are left at the end may take: 16 MB of rows are written in a few seconds."""

MAX_REPORTED: Final = 5
"""Troubles of one place that are told one by one; a disk that is full every minute fills nobody's log."""


@dataclass(frozen=True)
class SinkEvent:
    """What became of a sink: it has `trouble` and goes on trying, it `goes_on`, or it is `off` for good."""

    what: Literal["trouble", "goes_on", "off"]
    reason: str
    step: int


@dataclass(frozen=True)
class _Write:
    job: Job
    step: int
    size: int


class WriterThread:
    """One place that is written. `submit` takes a write, `settle` waits for it, at most `max_wait` seconds per trouble.

    A write that raises an `OSError`, or is late, is not given up: those behind it are kept, up to `kept_bytes` of them,
    until it can be done. What finds no room is a gap. Any other exception is a fault of the writer: the record is left
    out, and after `MAX_FAULTS` of them in a row the sink is off. A sink that is not `patient` is never waited for.
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
        self._faults = self._told = 0
        self._news: list[SinkEvent] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._work, name=f"trainsentry-{name}", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # an interpreter that is ending starts no threads: what comes is written at once
            self._thread = None

    @property
    def state(self) -> str:
        """What `status.json` says of it."""
        with self._changed:
            if self.off is None and self.trouble is not None:
                return f"{self.trouble}; it is tried again, and {len(self._writes)} writes are kept for it"
            return self.off or "writing"

    @property
    def is_busy(self) -> bool:
        """Whether there is something that it has not written yet."""
        with self._changed:
            return bool(self._writes)

    def take_events(self) -> list[SinkEvent]:
        """Return what has become of it since the last call."""
        with self._changed:
            news, self._news = self._news, []
        return news

    # ------------------------------------------------------------------ those who have something to write

    def submit(self, job: Job, step: int, size: int = 0, *, last: bool = False) -> None:
        """Take a write of something that belongs to `step` and holds `size` bytes; the `last` one finds room always."""
        with self._changed:
            size += JOB_BYTES
            if self.off is not None or self._closing:
                self._lose(step, self.off or "it is closed")
            elif self._writes and self._held + size > self.kept_bytes and not last:
                self._refusing = True
                self._lose(step, self.trouble or "it is slower than the training")
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
        """Wait for the writes that were taken; one that is late is left to itself."""
        with self._changed:
            while self.patient and self._writes and not self._may_go_on():
                waited = 0.0 if self._began is None else self._clock() - self._began
                if waited >= self.max_wait:
                    self._failing = True
                    self._complain(f"a write has not come back after {self.max_wait:g} s", self._writes[0].step)
                    return
                self._changed.wait(self.max_wait - waited)

    def close(self, seconds: float = FINISH_SECONDS) -> None:
        """Do what is left, as far as that can be done within `seconds`, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(LAST_SECONDS if self._failing else seconds)
        with self._changed:
            self._drop_all(self.trouble or "it was not written in time as the run ended")
            self.off = self.off or self.trouble

    def _may_go_on(self) -> bool:
        """Whether nobody need wait: it is off or in trouble, or catching up and not short of room."""
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
                self._failed(f"{type(error).__name__}: {error}", write.step)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, pause)
                pause = min(2 * pause, MAX_PAUSE)
                continue
            except Exception as error:  # noqa: BLE001 - whatever a writer raises, the sink reports it
                self._faulty(f"{type(error).__name__}: {error}", write.step)
            else:
                self._done()
            pause = FIRST_PAUSE

    def _next(self) -> _Write | None:
        """Return the oldest write, which stays where it is until it is done; None when there is nothing more to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._writes or self._closing)
            if not self._writes or self.off is not None:
                return None
            self._began = self._clock()
            return self._writes[0]

    def _done(self) -> None:
        with self._changed:
            self._remove_oldest()
            self.written += 1
            if self._faults:
                self._faults = 0
                self.gaps.end(self.name)
            self._failing = False
            if not self._writes and self.trouble is not None:
                self.trouble = None
                self._tell("goes_on", "", -1)
            self._changed.notify_all()

    def _failed(self, reason: str, step: int) -> None:
        """Keep a write that the file system has refused; at the end it is given up."""
        with self._changed:
            self._began = None
            self._failing = True
            self._complain(reason, step)
            if self._closing:
                self._drop_all(reason)
            self._changed.notify_all()

    def _faulty(self, reason: str, step: int) -> None:
        """Leave out a write that the writer itself cannot do."""
        with self._changed:
            self._remove_oldest()
            self._lose(step, reason)
            self._faults += 1
            if self._faults >= MAX_FAULTS:
                self.off = reason
                self._tell("off", reason, step)
                self._drop_all(reason)
            else:
                self._complain(reason, step)
            self._changed.notify_all()

    def _remove_oldest(self) -> None:
        if self._writes:  # those that came too late were given up meanwhile
            self._held -= self._writes.popleft().size
        self._began = None

    def _drop_all(self, reason: str) -> None:
        for write in self._writes:
            self._lose(write.step, reason)
        self._writes.clear()
        self._held = 0

    def _lose(self, step: int, reason: str) -> None:
        self.gaps.note(self.name, step, step, reason)

    def _complain(self, reason: str, step: int) -> None:
        if self.trouble is None:
            self._told += 1
            self._tell("trouble", reason, step)
        self.trouble = reason

    def _tell(self, what: Literal["trouble", "goes_on", "off"], reason: str, step: int) -> None:
        if self._told <= MAX_REPORTED or what == "off":
            self._news.append(SinkEvent(what, reason, step))
