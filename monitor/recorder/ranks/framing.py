"""One authenticated connection between two recorders: complete messages, each with a seal, within size limits."""

import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from trainsentry.collectors.ranks.handshake import TAG_BYTES, Refused, Seals

_FRAME: Final = struct.Struct("=II")
"""Kind and size; the seal follows, and then the message."""

_HEAD: Final = _FRAME.size + TAG_BYTES

JSON: Final = 1
RECORD: Final = 2

MAX_MESSAGE_BYTES: Final[Mapping[int, int]] = {JSON: 2**24, RECORD: 2**26}
"""Bytes of a message at most, by kind: a record of 100,000 series has 8 million; JSON about such a step has less."""

MAX_UNSENT_BYTES: Final = 2**26
"""Bytes kept for a peer that does not read; above that the connection is closed."""

READ_AT_ONCE: Final = 2**22
"""Bytes read from one connection before the others get their turn."""


@dataclass
class FramedConnection:
    """One connection, with its bytes of incomplete received messages (`inbox`) and of unsent ones (`outbox`).

    A connection that can no longer send (`mute`) may still hold messages that the other side sent before it ended.
    """

    sock: socket.socket
    rank: int
    seals: Seals
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    closed: bool = False
    mute: bool = False

    def put(self, kind: int, data: bytes) -> None:
        """Queue a message; close a connection whose outbox does not drain.

        Raises:
            ValueError: when the message is larger than the other side accepts.

        """
        if self.mute or self.closed:
            return
        if len(data) > MAX_MESSAGE_BYTES[kind]:
            raise ValueError(f"a message of {len(data)} bytes; allowed: at most {MAX_MESSAGE_BYTES[kind]}")
        if len(self.outbox) + len(data) > MAX_UNSENT_BYTES:
            self.closed = True
            return
        head = _FRAME.pack(kind, len(data))
        self.outbox += head + self.seals.seal(head, data) + data

    def send(self) -> None:
        """Send as much as the socket takes."""
        while self.outbox and not self.closed:
            try:
                del self.outbox[: self.sock.send(memoryview(self.outbox)[: 1 << 20])]
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.mute = True
                self.outbox.clear()

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Yield the complete messages; one with a wrong seal or size closes the connection."""
        self._read()
        while len(self.inbox) >= _HEAD:
            kind, size = _FRAME.unpack_from(self.inbox)
            if size > MAX_MESSAGE_BYTES.get(kind, -1):
                self.closed = True
                return
            if len(self.inbox) < _HEAD + size:
                return
            head, seal = bytes(self.inbox[: _FRAME.size]), bytes(self.inbox[_FRAME.size : _HEAD])
            message = bytes(self.inbox[_HEAD : _HEAD + size])
            del self.inbox[: _HEAD + size]
            try:
                self.seals.check(seal, head, message)
            except Refused:
                self.closed = True
                return
            yield kind, message

    def _read(self) -> None:
        """Read received bytes up to a limit, so that a fast sender does not block other work."""
        left = READ_AT_ONCE
        while left > 0 and not self.closed:
            try:
                data = self.sock.recv(1 << 18)
            except (BlockingIOError, InterruptedError):
                self.closed = self.mute  # everything received is read
                return
            except OSError:
                data = b""
            self.closed = not data
            self.inbox += data
            left -= len(data)
