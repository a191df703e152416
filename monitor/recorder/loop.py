"""The recorder's loop: waits for the trainer, reads the ring, and ends when the trainer is gone."""

import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from trainsentry.collectors.record import StepRecord
from trainsentry.monitor.recorder.messages import CONTROL, DEFINITIONS, FRAGMENT, RECORD, decode, encode
from trainsentry.monitor.recorder.ranks import network
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.ring import Ring
from trainsentry.monitor.recorder.session import Session
from trainsentry.monitor.recorder.status import LATE_STEPS

IDLE_SECONDS: Final = 1.0
"""Seconds without an announcement after which the recorder checks that the trainer is still there."""

PAUSE_SECONDS: Final = 0.05
"""Seconds to sleep when the connections cannot be polled."""


class Intake:
    """Takes messages out of the ring and hands them to the session."""

    def __init__(self, session: Session, ring: Ring) -> None:
        self.session = session
        self.ring = ring
        self._fragments: list[bytes] = []
        self._looked_to = 0
        session.newest = lambda: ring.newest

    def drain(self, up_to: int, between: Callable[[], None] = lambda: None) -> bool:
        """Handle every message before `up_to`, calling `between` after each; return False after a close message."""
        while (message := self.ring.read(up_to)) is not None:
            kind, data = message
            if kind == RECORD and self._is_late():
                self._look_ahead(up_to)
            try:
                is_open = self._handle(kind, data)
            except Exception as error:  # noqa: BLE001 - one bad message must not end the recording
                is_open = True
                self.session.failed("recorder", error, self.session.step)
            self.ring.commit()
            between()
            if not is_open:
                return False
        return True

    def _is_late(self) -> bool:
        return self.ring.newest[0] - self.session.step > LATE_STEPS

    def _look_ahead(self, up_to: int) -> None:
        """Judge the records that wait by the rules that need no history, each once, so that NaN is told in time."""
        for position, kind, data in self.ring.ahead(self._looked_to, up_to):
            self._looked_to = position
            try:
                if kind == DEFINITIONS:
                    self.session.table.define(decode(data))
                elif kind == RECORD:
                    self.session.look_at(StepRecord.decode(data))
            except Exception as error:  # noqa: BLE001 - it is judged again in its turn
                self.session.failed("recorder", error, self.session.step)

    def _handle(self, kind: int, data: bytes) -> bool:
        if kind == RECORD:
            self.session.take_record(StepRecord.decode(data))
        elif kind == DEFINITIONS:
            self.session.table.define(decode(data))
        elif kind == CONTROL:
            whole, self._fragments = b"".join([*self._fragments, data]), []
            return self.session.take_control(decode(whole))
        elif kind == FRAGMENT:
            self._fragments.append(data)
        return True


class Recorder:
    """Serves one trainer until it closes the session or is gone.

    The trainer announces the ring's new head through the socket: the system call orders the two processes' memory
    accesses, which a plain read of the ring's counter does not on every processor.
    """

    def __init__(self, settings: RecorderSettings, ring: Ring, channel: socket.socket) -> None:
        self.settings = settings
        self.ring = ring
        self.channel = channel
        self._outgoing: deque[bytes] = deque()
        self._announced = 0
        self._rest = b""
        self.session = Session(settings, self._send)
        self.intake = Intake(self.session, ring)

    def serve(self) -> None:
        """Run until the trainer closes the session, or is gone and the ring is empty."""
        self.channel.setblocking(False)
        state, up_to, running = "closed", self.ring.head, True
        while running:
            running = self._drain(up_to)
            self._flush_outgoing()
            if not running:
                break
            gone = self._wait()
            self.session.check_periodically()
            up_to = self.ring.head if gone or not self._announced else self._announced
            if gone:
                state = "closed" if not self._drain(self.ring.head) else "trainer gone"
                break
        self.session.close(state)
        self._flush_outgoing(patient=True)

    def _drain(self, up_to: int) -> bool:
        return self.intake.drain(up_to, self._flush_outgoing)

    def _wait(self) -> bool:
        """Sleep until the trainer announces new messages; return True when it is gone."""
        ready = self._select()
        if self.session.rank_tree is not None:
            self.session.rank_tree.pump()
        if ready and not any(key.fileobj is self.channel and mask & selectors.EVENT_READ for key, mask in ready):
            return False
        if not ready:
            self._announced = self.ring.head
            return self.settings.parent > 0 and os.getppid() != self.settings.parent
        try:
            data = self.channel.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if not data:
            return True
        data = self._rest + data
        whole = len(data) // 8 * 8
        if whole:
            self._announced = struct.unpack_from("=Q", data, whole - 8)[0]
        self._rest = data[whole:]
        return False

    def _select(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until a connection can be read or written, or until a timeout."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        rank_tree = self.session.rank_tree
        try:
            with network.new_selector() as selector:
                selector.register(self.channel, events)
                if rank_tree is not None:
                    rank_tree.network.register(selector)
                return selector.select(IDLE_SECONDS if rank_tree is None else network.RETRY_SECONDS)
        except (OSError, ValueError, KeyError) as error:  # a closed socket, never the trainer's
            if rank_tree is not None:
                rank_tree.cut_off(error)
            time.sleep(PAUSE_SECONDS)
            return []

    def _send(self, message: dict[str, Any]) -> None:
        self._outgoing.append(encode(message) + b"\n")
        self._flush_outgoing()

    def _flush_outgoing(self, *, patient: bool = False) -> None:
        """Send as much as the socket takes; a trainer that does not read never blocks the recorder."""
        if patient:
            self.channel.settimeout(self.settings.max_wait)
        while self._outgoing:
            data = self._outgoing.popleft()
            try:
                sent = self.channel.send(data)
            except (BlockingIOError, TimeoutError):
                self._outgoing.appendleft(data)
                return
            except OSError:
                self._outgoing.clear()
                return
            if sent < len(data):
                self._outgoing.appendleft(data[sent:])
