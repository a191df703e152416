"""The trainer's end of the recorder: sends records, receives requests, starts a successor when the recorder dies.

At the end it writes the records that no recorder has written.
"""

import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.drain import steps_in, write_remaining
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.ring import Ring
from trainsentry.monitor.recorder.sinks.gaps import steps_text
from trainsentry.monitor.recorder.sinks.known_gaps import KnownGaps
from trainsentry.monitor.recorder.start import Running, Starter, is_stopped, start_recorder

logger = logging.getLogger("trainsentry")

MAX_RECORDERS: Final = 4
"""Recorders started in one run, the first and three successors; a cause that kills four would kill a fifth."""

SERIES_PER_MESSAGE: Final = 1000
"""Series defined in one message, about 200 kB; fewer if the ring is small or the names are long."""

CLOSED: Final = "closed"
"""The value of `dead` for a recorder that ended on request."""

POLL_SECONDS: Final = 0.001
"""Seconds between two attempts to write while the ring is full."""

MOST_SECONDS: Final = 1.0
"""Seconds that count of the time between two attempts: hours pass where the process is suspended meanwhile."""


class RecorderLink:
    """Carries records to the recorder and its messages back; never raises into the training loop.

    A full ring is waited for at most `settings.max_wait` seconds in total per trouble; then records are dropped and
    counted until half of it is free. When no recorder is left, the ring keeps records as long as it has room, and
    `close` writes them. `gaps` holds the gaps that this side knows.
    """

    def __init__(self, settings: RecorderSettings, table: SeriesTable, starter: Starter = start_recorder) -> None:
        self.settings = settings
        self.table = table
        self.dropped = 0
        self.relay = 0
        self.dead: str | None = None
        self.lost_recorders: list[str] = []
        self._starter = starter
        self._sent_series = self._sent_layouts = 0
        self._patience = settings.max_wait
        self._dropping = False
        self.gaps = KnownGaps()
        self.nothing_written: str | None = None
        self.recorder_seconds: float | None = None
        self.drained = False
        self._counters: dict[str, Any] = {}
        self._lines = messages.LineReader()
        self._inbox: list[dict[str, Any]] = []
        self._tokens = 0
        self._closing = False
        self._verdicts_missing = 0
        self._pid = os.getpid()
        self.ring = Ring.create(settings.ring_size)
        self._running = self._start(settings)

    @property
    def mode(self) -> str:
        """`process` or `thread`."""
        return self._running.mode

    @property
    def running(self) -> Running:
        """The current recorder."""
        return self._running

    def _start(self, settings: RecorderSettings) -> Running:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        try:
            return self._starter(settings, self.ring, theirs)
        finally:
            theirs.close()

    # ------------------------------------------------------------------ to the recorder

    def send_record(self, record: StepRecord) -> None:
        """Send a record, split into parts if the ring is small."""
        self.ring.note_newest(record.step, record.time)
        self.gaps.newest = max(self.gaps.newest, record.step)
        if not self._send_definitions():  # the recorder cannot use a record with unknown series
            self._note_dropped(record.step)
            return
        for part in record.parts(self.ring.largest_message - 64):
            if not self._write(messages.RECORD, part.encode()):
                self._note_dropped(record.step)
                return
        self._send_gap()

    def _send_gap(self) -> None:
        """Report the dropped records to the recorder, now that there is room."""
        message = {"type": messages.GAP, "gap": self.gaps.dropped}
        if self.gaps.dropped is not None and self._write(messages.CONTROL, [messages.encode(message)], wait=False):
            self.gaps.dropped = None

    def send(self, kind: str, **content: Any) -> bool:
        """Send a control message; return whether there was room."""
        if kind == messages.COUNTERS:
            self._counters = content["counters"]
        data = messages.encode({"type": kind, **content})
        room = self.ring.largest_message
        while len(data) > room:
            if not self._write(messages.FRAGMENT, [data[:room]]):
                return False
            data = data[room:]
        return self._write(messages.CONTROL, [data])

    def reconfigure(self, config: dict[str, Any], detect: dict[str, Any] | None) -> None:
        """Have this recorder, and any successor, follow another configuration."""
        self.settings = replace(self.settings, config=config, detect=detect)
        self.send(messages.RECONFIGURE, config=config, detect=detect)

    def _send_definitions(self) -> bool:
        series, layouts = len(self.table.series), len(self.table.layouts)
        at_once = SERIES_PER_MESSAGE
        while self._sent_series < series or self._sent_layouts < layouts:
            part = self.table.definitions(self._sent_series, self._sent_layouts, at_once)
            data = messages.encode(part)
            if len(data) > self.ring.largest_message and at_once > 1:
                at_once //= 2
                continue
            if not self._write(messages.DEFINITIONS, [data]):
                return False
            # the recorder may have died in between, and its successor got all definitions
            self._sent_series = max(self._sent_series, part["series_from"] + len(part["series"]))
            self._sent_layouts = max(self._sent_layouts, part["layouts_from"] + len(part["layouts"]))
        return True

    def _write(self, kind: int, chunks: Sequence[bytes], *, wait: bool = True) -> bool:
        if self.dead == CLOSED or os.getpid() != self._pid:
            return False
        if self._dropping and self.ring.used > self.ring.size // 2:
            return False
        while not self.ring.write(kind, chunks):
            if not wait:
                return False
            if (self._patience <= 0 or self.dead is not None) and not self._replace_stopped():
                self._dropping = True
                return False
            began = time.monotonic()  # a sleep may take ten times as long on busy cores
            time.sleep(POLL_SECONDS)
            self._patience -= min(time.monotonic() - began, MOST_SECONDS)
            self._inbox += self._receive()
        if self.ring.used < self.ring.size // 2:
            self._patience = self.settings.max_wait
        self._dropping = False
        if self.dead is None:
            self._announce()
        return True

    def _replace_stopped(self) -> bool:
        """Start a successor if a signal has stopped the recorder; return whether there is one."""
        if self.dead is not None or not is_stopped(self._running):
            return False
        self._start_successor("it was stopped")
        return self.dead is None

    def _announce(self) -> None:
        try:
            self._channel.send(struct.pack("=Q", self.ring.head))
        except BlockingIOError:
            pass  # the recorder has earlier announcements to read, and checks the ring when idle
        except OSError:
            self._ended()

    def _note_dropped(self, step: int) -> None:
        self.dropped += 1
        reason = "the ring was full" if self.dead is None else f"{self.dead}, and the ring was full"
        if self.gaps.drop(step, reason):
            logger.error(
                "trainsentry: the recorder does not keep up (%s); records are left out from step %d on. "
                "Training goes on.",
                reason,
                step,
            )

    # ------------------------------------------------------------------ from the recorder

    def poll(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived, without waiting."""
        found, self._inbox = self._inbox + self._receive(), []
        return found

    def wait_for(
        self, wanted: Callable[[dict[str, Any]], bool], timeout: float, relay: int | None = None
    ) -> list[dict[str, Any]]:
        """Return messages up to one that is `wanted`, or those that arrive within `timeout` seconds.

        `relay` is the number of the recorder that must answer; the wait ends if a successor replaces it.
        """
        found: list[dict[str, Any]] = []
        last_running = time.monotonic()
        end = last_running + timeout
        while self.dead is None:
            found += self.poll()
            left = end - time.monotonic()
            if any(wanted(m) for m in found) or left <= 0 or self.dead is not None or relay not in {None, self.relay}:
                break
            if not is_stopped(self._running):
                last_running = time.monotonic()
            elif time.monotonic() - last_running >= self.settings.max_wait:
                break  # nobody continues it
            with selectors.DefaultSelector() as selector:  # unlike select(), it accepts any descriptor
                selector.register(self._channel, selectors.EVENT_READ)
                selector.select(min(left, 0.05))
        return found

    def wait_for_verdict(self, step: int) -> list[dict[str, Any]]:
        """Wait until the recorder has judged an examined step; return the messages that arrived.

        After a timeout, the trainer does not wait again until the recorder has answered.
        """
        self._verdicts_missing += 1
        patience = self.settings.max_wait if self._verdicts_missing == 1 else 0.0

        def is_verdict(message: dict[str, Any]) -> bool:
            return bool(message["type"] == messages.EXAMINED and message["step"] == step)

        return self.wait_for(is_verdict, patience)

    def ask(self, kind: str, answer: str, timeout: float) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Send a request and wait for its answer; return the other messages that arrived, and the answer.

        If the recorder dies meanwhile, its successor gets the request again.
        """
        found: list[dict[str, Any]] = []
        answers: list[dict[str, Any]] = []
        end, relay = time.monotonic() + timeout, -1
        if not is_stopped(self._running):  # a slow recorder gets its full time again
            self._dropping, self._patience = False, self.settings.max_wait
        while not answers and relay != self.relay and self.dead is None:
            self._tokens += 1
            relay, token = self.relay, self._tokens
            if not self.send(kind, token=token):
                return found + self.poll(), None
            found += self.wait_for(partial(_answers, answer, token), end - time.monotonic(), relay)
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
            found += self._messages_in(data)
        return found

    def _messages_in(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that `data` completes, and note those about gaps, verdicts and the end."""
        received = self._lines.feed(data)
        for message in received:
            self.gaps.note_message(message)
            if message["type"] == messages.EXAMINED:
                self._verdicts_missing = 0  # however late, it judges again
            elif message["type"] == messages.CLOSED:
                self.recorder_seconds = message["recorder_seconds"]
                self.nothing_written = message["nothing_written"]
        return received

    # ------------------------------------------------------------------ end and successors

    def _ended(self) -> None:
        """Handle the end of the connection: the recorder closed on request, or died."""
        if self._closing:
            self.dead = CLOSED
        else:
            self._start_successor("it ended")

    def _start_successor(self, reason: str) -> None:
        """Start a successor for a recorder that died; the ring still holds the messages that it had not finished."""
        self.lost_recorders.append(reason)
        self._channel.close()
        self._lines = messages.LineReader()
        self.gaps.recorder_died()
        if self.relay + 1 >= MAX_RECORDERS:
            self.dead = f"{self.relay + 1} recorders died"
            logger.error(
                "trainsentry: %s; recording stops. The records that fit into the ring are written at the end. "
                "Training goes on.",
                self.dead,
            )
            return
        logger.error(
            "trainsentry: the recorder died (%s); a new one takes over where it stopped. Training goes on.",
            reason,
        )
        self._begin_relay()

    def _begin_relay(self) -> None:
        self.relay += 1
        if not self._running.kill():
            self._give_up("the recorder does not end, so no successor can start")
            return
        self._sent_series, self._sent_layouts = len(self.table.series), len(self.table.layouts)
        try:
            self._running = self._start(self._successor())
        except OSError as error:
            self._give_up(f"no recorder can be started: {error}")
            return
        self._patience = self.settings.max_wait
        self._announce()

    def _give_up(self, reason: str) -> None:
        self.dead = reason
        logger.error("trainsentry: %s. Training goes on.", reason)

    def _successor(self) -> RecorderSettings:
        definitions = self.table.definitions()
        return replace(self.settings, definitions=definitions, relay=self.relay, gaps=list(self.gaps.known))

    def close(self, timeout: float) -> list[dict[str, Any]]:
        """Let the recorder finish, then end it; return its last messages. A hung recorder is killed.

        This process then writes what is left in the ring.
        """
        found: list[dict[str, Any]] = []
        self._send_gap()
        self._closing = self.dead is None and self.send(messages.CLOSE)
        if self._closing:
            found = self.wait_for(lambda m: m["type"] == messages.CLOSED, timeout)
        finished = any(m["type"] == messages.CLOSED for m in found)
        self._channel.close()
        gone = self._running.join(timeout if finished else 1.0) or self._running.kill()
        if not finished:
            found += self._finish(gone=gone)
        self.ring.close()
        return found

    def _finish(self, *, gone: bool) -> list[dict[str, Any]]:
        """Write what is left in the ring, if the recorder is gone; return the messages of the writing session."""
        self.gaps.end()
        self.gaps.recorder_died()
        if self.dead in {None, CLOSED}:
            self.dead = "the recorder did not answer at the end of the run, and was killed"
        left = steps_in(self.ring)
        steps = "no record" if left is None else steps_text(*left)
        received = None
        if gone:
            logger.error("trainsentry: %s; the training process writes the rest: %s.", self.dead, steps)
            state = f"recorder dead: {self.dead}"
            received = write_remaining(self._successor(), self.ring, state, self._counters)
        if received is None:
            if left is not None:
                self.gaps.add("recorder", *left, self.dead)
            logger.error("trainsentry: %s; lost: %s.", self.dead, steps)
            return []
        for message in received:
            self.gaps.note_message(message)
            if message["type"] == messages.CLOSED:
                self.nothing_written, self.drained = message["nothing_written"], True
        return received


def _answers(kind: str, token: int, message: dict[str, Any]) -> bool:
    return bool(message["type"] == kind and message.get("token") == token)
