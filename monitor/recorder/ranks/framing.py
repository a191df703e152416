"""One connection between two recorders that know each other: whole messages, each under its seal, within bounds."""

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
"""Bytes of a message of each kind: a record of 100,000 series has 8 million, what is told of a step of as many less."""

MAX_UNSENT_BYTES: Final = 2**26
"""Bytes that are kept for a parent that does not read; beyond them the link is given up."""

READ_AT_ONCE: Final = 2**22
"""Bytes that are read from one connection before the others have their turn."""


@dataclass
class FramedConnection:
    """One connection: what was received and is not a whole message yet, and what is still to be sent.

    One that takes nothing any more (`mute`) may still hold what the other side said before it went.
    """

    sock: socket.socket
    rank: int
    seals: Seals
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    closed: bool = False
    mute: bool = False

    def put(self, kind: int, data: bytes) -> None:
        """Take a message to be sent; a link that does not drain is given up.

        Raises:
            ValueError: when the message is larger than the other side takes.

        """
        if self.mute or self.closed:
            return
        if len(data) > MAX_MESSAGE_BYTES[kind]:
            raise ValueError(f"a message of {len(data)} bytes; other recorders take at most {MAX_MESSAGE_BYTES[kind]}")
        if len(self.outbox) + len(data) > MAX_UNSENT_BYTES:
            self.closed = True
            return
        head = _FRAME.pack(kind, len(data))
        self.outbox += head + self.seals.seal(head, data) + data

    def send(self) -> None:
        """Send what the socket takes."""
        while self.outbox and not self.closed:
            try:
                del self.outbox[: self.sock.send(memoryview(self.outbox)[: 1 << 20])]
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.mute = True
                self.outbox.clear()

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Yield the messages that have arrived whole; one that is not the other side's ends the connection."""
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
        """Read what has arrived, up to a bound: a fast sender must not keep this side from all else."""
        left = READ_AT_ONCE
        while left > 0 and not self.closed:
            try:
                data = self.sock.recv(1 << 18)
            except (BlockingIOError, InterruptedError):
                self.closed = self.mute  # all that had come is read
                return
            except OSError:
                data = b""
            self.closed = not data
            self.inbox += data
            left -= len(data)
