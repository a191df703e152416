"""The trainer's end of the recorder: sends records, hears requests, starts a successor when it dies."""

import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.hello import Hello, with_definitions
from trainsentry.monitor.recorder.start import Running, Starter, start_recorder
from trainsentry.monitor.ring import Ring

logger = logging.getLogger("trainsentry")

MAX_RECORDERS: Final = 4
"""Recorders started in one run: one, and three successors; what kills four will kill the fifth."""

DEFINITIONS_AT_ONCE: Final = 1000
"""Series defined in one message, about 200 kB; fewer where the ring is small or the names are long."""

POLL_SECONDS: Final = 0.001
"""How often a full ring is looked at while the trainer waits for room."""


class RecorderLink:
    """Carries records to the recorder and its messages back. Nothing here raises into the training loop.

    The ring is waited for at most `hello.max_wait` seconds in total per trouble; then records are dropped and
    counted until there is room again.
    """

    def __init__(self, hello: Hello, table: SeriesTable, starter: Starter = start_recorder) -> None:
        self.hello = hello
        self.table = table
        self.dropped = 0
        self.relay = 0
        self.dead: str | None = None
        self.lost_recorders: list[str] = []
        self._starter = starter
        self._sent_series = self._sent_layouts = 0
        self._patience = hello.max_wait
        self._gap: dict[str, Any] | None = None
        self._lines = messages.LineReader()
        self._inbox: list[dict[str, Any]] = []
        self._tokens = 0
        self._closing = False
        self._verdicts_missing = 0
        self._pid = os.getpid()
        self.ring = Ring.create(hello.ring_size)
        self._running = self._start(hello)

    @property
    def mode(self) -> str:
        """`process` or `thread`."""
        return self._running.mode

    @property
    def running(self) -> Running:
        """The recorder that was started last."""
        return self._running

    def _start(self, hello: Hello) -> Running:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        try:
            return self._starter(hello, self.ring, theirs)
        finally:
            theirs.close()

    # ------------------------------------------------------------------ to the recorder

    def send_record(self, record: StepRecord) -> None:
        """Hand over a record, cut into parts where the ring is small."""
        if not self._send_definitions():  # a record whose series are unknown there would be worse than none
            self._note_dropped(record.step)
            return
        for part in record.parts(self.ring.largest_message - 64):
            if not self._write(messages.RECORD, part.encode()):
                self._note_dropped(record.step)
                return
        if self._gap is not None and self._write(messages.CONTROL, [messages.encode(self._gap)], wait=False):
            self._gap = None

    def send(self, kind: str, **content: Any) -> bool:
        """Send a control message; return whether there was room."""
        data = messages.encode({"type": kind, **content})
        room = self.ring.largest_message
        while len(data) > room:
            if not self._write(messages.FRAGMENT, [data[:room]]):
                return False
            data = data[room:]
        return self._write(messages.CONTROL, [data])

    def _send_definitions(self) -> bool:
        series, layouts = len(self.table.series), len(self.table.layouts)
        at_once = DEFINITIONS_AT_ONCE
        while self._sent_series < series or self._sent_layouts < layouts:
            part = self.table.definitions(self._sent_series, self._sent_layouts, at_once)
            data = messages.encode(part)
            if len(data) > self.ring.largest_message and at_once > 1:
                at_once //= 2
                continue
            if not self._write(messages.DEFINITIONS, [data]):
                return False
            # a recorder may have died meanwhile, and its successor been told all there is
            self._sent_series = max(self._sent_series, part["series_from"] + len(part["series"]))
            self._sent_layouts = max(self._sent_layouts, part["layouts_from"] + len(part["layouts"]))
        return True

    def _write(self, kind: int, chunks: Sequence[bytes], *, wait: bool = True) -> bool:
        if self.dead is not None or os.getpid() != self._pid:
            return False
        while not self.ring.write(kind, chunks):
            if not wait or self._patience <= 0 or self.dead is not None:
                return False
            self._inbox += self._receive()
            time.sleep(POLL_SECONDS)
            self._patience -= POLL_SECONDS
        if self.ring.used < self.ring.size // 2:
            self._patience = self.hello.max_wait
        self._announce()
        return True

    def _announce(self) -> None:
        try:
            self._channel.send(struct.pack("=Q", self.ring.head))
        except BlockingIOError:
            pass  # the recorder has earlier announcements to read, and looks at the ring when it idles
        except OSError:
            self._ended()

    def _note_dropped(self, step: int) -> None:
        self.dropped += 1
        if self._gap is None:
            logger.error(
                "trainsentry: the recorder does not keep up; records are left out from step %d on. Training goes on.",
                step,
            )
            self._gap = {"type": messages.GAP, "gap": {"from_step": step, "reason": "the ring was full"}}
        self._gap["gap"]["to_step"] = step

    # ------------------------------------------------------------------ from the recorder

    def poll(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived, without waiting."""
        found, self._inbox = self._inbox + self._receive(), []
        return found

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], timeout: float) -> list[dict[str, Any]]:
        """Return messages up to one that is `wanted`, or what has come within `timeout` seconds."""
        found: list[dict[str, Any]] = []
        end = time.monotonic() + timeout
        while self.dead is None:
            found += self.poll()
            left = end - time.monotonic()
            if any(wanted(m) for m in found) or left <= 0 or self.dead is not None:
                break
            with selectors.DefaultSelector() as selector:  # unlike select(), it takes any descriptor
                selector.register(self._channel, selectors.EVENT_READ)
                selector.select(min(left, 0.05))
        return found

    def wait_for_verdict(self, step: int) -> list[dict[str, Any]]:
        """Wait until the recorder has judged an examined step; return the messages that came.

        A recorder that has let the trainer wait in vain is not waited for again until it has answered.
        """
        self._verdicts_missing += 1
        patience = self.hello.max_wait if self._verdicts_missing == 1 else 0.0

        def is_verdict(message: dict[str, Any]) -> bool:
            return bool(message["type"] == messages.EXAMINED and message["step"] == step)

        return self.wait_for(is_verdict, patience)

    def ask(self, kind: str, answer: str, timeout: float) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Send a request and wait for its answer; return the other messages that came, and the answer."""
        self._tokens += 1
        token = self._tokens
        if not self.send(kind, token=token):
            return self.poll(), None
        found = self.wait_for(lambda m: m["type"] == answer and m.get("token") == token, timeout)
        answers = [m for m in found if m["type"] == answer]
        return [m for m in found if m["type"] != answer], answers[-1] if answers else None

    def _receive(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while self.dead is None:
            try:
                data = self._channel.recv(1 << 16)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._ended()
                break
            if not data:
                self._ended()
                break
            found += self._lines.feed(data)
        if any(m["type"] == messages.EXAMINED for m in found):
            self._verdicts_missing = 0  # however late: it judges again
        return found

    # ------------------------------------------------------------------ life and death

    def _ended(self) -> None:
        """Note that the recorder hung up: as it was told to, or because it died."""
        if self._closing:
            self.dead = "closed"
        else:
            self._succeed("it ended")

    def _succeed(self, reason: str) -> None:
        """Start a successor for a recorder that died; what it had not finished is still in the ring."""
        self.lost_recorders.append(reason)
        self._channel.close()
        self._lines = messages.LineReader()
        if self.relay + 1 >= MAX_RECORDERS:
            self.dead = f"{self.relay + 1} recorders died"
            logger.error("trainsentry: %s; nothing more is recorded. Training goes on.", self.dead)
            return
        logger.error(
            "trainsentry: the recorder died (%s); a new one takes over where it stopped. Training goes on.",
            reason,
        )
        self._begin_relay()

    def _begin_relay(self) -> None:
        self.relay += 1
        self._running.kill()
        self._sent_series, self._sent_layouts = len(self.table.series), len(self.table.layouts)
        try:
            self._running = self._start(with_definitions(self.hello, self.table, self.relay))
        except OSError as error:
            self.dead = f"no recorder can be started: {error}"
            logger.error("trainsentry: %s. Training goes on.", self.dead)  # noqa: TRY400 - the cause is named
            return
        self._announce()

    def close(self, timeout: float) -> list[dict[str, Any]]:
        """Let the recorder finish and end it; return its last messages. One that hangs is killed."""
        found: list[dict[str, Any]] = []
        self._closing = self.dead is None and self.send(messages.CLOSE)
        if self._closing:
            found = self.wait_for(lambda m: m["type"] == messages.CLOSED, timeout)
        self._channel.close()
        if not self._running.join(timeout if found else 1.0):
            self._running.kill()
        self.ring.close()
        return found
