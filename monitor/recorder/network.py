"""Sockets between the recorders of several ranks. Nothing waits: what cannot be sent now is kept, within bounds."""

import contextlib
import errno
import hmac
import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from trainsentry.monitor.recorder.place import Place

_FRAME: Final = struct.Struct("=II")

JSON: Final = 1
RECORD: Final = 2

LARGEST_FRAME: Final = 2**26
"""Bytes of a message; a record of 100,000 series has 8 million."""

MOST_UNSENT: Final = 2**26
"""Bytes that are kept for a parent that does not read; beyond them the link is given up."""

LONGEST_WORD: Final = 1024
"""Bytes that a caller may send before it has said its word."""

RETRY_SECONDS: Final = 0.5
"""How often a parent that is not there yet is called."""

AGAIN_SECONDS: Final = 5.0
"""How long a parent that was there before is called: a successor of a recorder that died starts in a second."""

PATIENCE_SECONDS: Final = 60.0
"""How long a parent is called, and a child waited for: ranks start at different times, a minute apart at most."""


@dataclass
class Link:
    """One connection: what was received and is not a whole message yet, and what is still to be sent.

    One that takes nothing any more (`mute`) may still hold what the other side said before it went.
    """

    sock: socket.socket
    rank: int = -1
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    closed: bool = False
    mute: bool = False

    def put(self, kind: int, data: bytes) -> None:
        """Take a message to be sent; a link that does not drain is given up."""
        if self.mute:
            return
        if len(self.outbox) + len(data) > MOST_UNSENT:
            self.closed = True
            return
        self.outbox += _FRAME.pack(kind, len(data)) + data

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
        """Yield the messages that have arrived whole."""
        while not self.closed:
            try:
                data = self.sock.recv(1 << 18)
            except (BlockingIOError, InterruptedError):
                self.closed = self.mute  # all that had come is read
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            self.inbox += data
        while len(self.inbox) >= _FRAME.size:
            kind, size = _FRAME.unpack_from(self.inbox)
            if size > LARGEST_FRAME:
                self.closed = True
                return
            if len(self.inbox) < _FRAME.size + size:
                return
            message = bytes(self.inbox[_FRAME.size : _FRAME.size + size])
            del self.inbox[: _FRAME.size + size]
            yield kind, message


class Network:
    """The recorder's connections: to its parent, and from its children, who say a word to be let in."""

    def __init__(self, place: Place, clock: Callable[[], float] = time.monotonic) -> None:
        self.place = place
        self.parent: Link | None = None
        self.children: dict[int, Link] = {}
        self.lost_parent = False
        self._clock = clock
        self._strangers: list[Link] = []
        self._began = self._started = clock()
        self._patience = PATIENCE_SECONDS
        self._tried = -RETRY_SECONDS
        self._calling: socket.socket | None = None
        self._listening: socket.socket | None = None
        if place.descriptor >= 0 and place.children:
            self._listening = socket.socket(fileno=place.descriptor)
            self._listening.setblocking(False)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have a selector wake up for what these sockets wait for."""
        if self._listening is not None:
            selector.register(self._listening, selectors.EVENT_READ)
        if self._calling is not None:
            selector.register(self._calling, selectors.EVENT_WRITE)
        for link in self._links():
            selector.register(link.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outbox else 0))

    def pump(self) -> Iterator[tuple[int, int, bytes]]:
        """Send and receive what is possible now; yield (rank, kind, message), the parent's rank being its own."""
        self._call_parent()
        self._let_in()
        for link in list(self._links()):
            link.send()
            if link.rank >= 0:
                yield from ((link.rank, kind, data) for kind, data in link.receive())
        self._drop_closed()

    @property
    def awaited(self) -> bool:
        """Whether children that have not come yet are still waited for."""
        return self._clock() - self._started < PATIENCE_SECONDS

    def lose_parent(self) -> None:
        """Go on without the parent, which has said that it ends."""
        self.lost_parent = True
        if self.parent is not None:
            self.parent.closed = True

    def tell_parent(self, message: dict[str, Any]) -> None:
        """Send a message up."""
        self.send_up(JSON, json.dumps(message).encode())

    def send_up(self, kind: int, data: bytes) -> None:
        """Send bytes up; what cannot be sent is lost with the link."""
        if self.parent is not None:
            self.parent.put(kind, data)
            self.parent.send()

    def tell_children(self, message: dict[str, Any]) -> None:
        """Send a message to every child."""
        data = json.dumps(message).encode()
        for link in self.children.values():
            link.put(JSON, data)
            link.send()

    def tell_child(self, rank: int, message: dict[str, Any]) -> None:
        """Send a message to one child, if it is there."""
        if rank in self.children:
            self.children[rank].put(JSON, json.dumps(message).encode())
            self.children[rank].send()

    @property
    def unsent(self) -> int:
        """Bytes still to be sent."""
        return sum(len(link.outbox) for link in self._links())

    def close(self) -> None:
        """Close every connection."""
        for link in self._links():
            link.sock.close()
        for sock in (self._listening, self._calling):
            if sock is not None:
                sock.close()
        self.parent, self._listening, self._calling = None, None, None
        self.children.clear()

    def _links(self) -> Iterator[Link]:
        if self.parent is not None:
            yield self.parent
        yield from self.children.values()
        yield from self._strangers

    def _call_parent(self) -> None:
        """Connect to the parent; it may not be there yet."""
        address = self.place.parent
        if address is None or self.parent is not None or self.lost_parent:
            return
        if self._calling is None:
            if self._clock() - self._tried < RETRY_SECONDS:
                return
            self._tried = self._clock()
            self._calling = socket.socket(socket.AF_INET6 if ":" in address.ip else socket.AF_INET)
            self._calling.setblocking(False)
        state = self._calling.connect_ex((address.ip, address.port))
        if state in {0, errno.EISCONN}:
            self.parent, self._calling = Link(self._calling, address.rank), None
            self.tell_parent({"type": "word", "rank": self.place.rank, "token": address.token})
        elif state not in {errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK}:
            self._calling.close()
            self._calling = None
            self.lost_parent = self._clock() - self._began >= self._patience

    def _let_in(self) -> None:
        while self._listening is not None:
            try:
                sock, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                break
            sock.setblocking(False)
            self._strangers.append(Link(sock))
        for link in list(self._strangers):
            first = next(link.receive(), None)
            if first is None and not link.closed and len(link.inbox) < LONGEST_WORD:
                continue
            self._strangers.remove(link)
            rank = self._rank_of(first)
            if rank is None:
                link.sock.close()
                continue
            link.rank = rank
            if rank in self.children:
                self.children[rank].sock.close()
            self.children[rank] = link

    def _rank_of(self, first: "tuple[int, bytes] | None") -> int | None:
        """Return the rank of a caller who knows the word, else None."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            if first is not None and first[0] == JSON:
                said = json.loads(first[1])
                if hmac.compare_digest(str(said["token"]), self.place.token) and said["rank"] in self.place.children:
                    return int(said["rank"])
        return None

    def _drop_closed(self) -> None:
        if self.parent is not None and self.parent.closed:
            self.parent.sock.close()
            self.parent, self._tried, self._began = None, self._clock(), self._clock()
            self._patience = AGAIN_SECONDS
        for rank in [rank for rank, link in self.children.items() if link.closed]:
            self.children.pop(rank).sock.close()
        self._strangers = [link for link in self._strangers if not link.closed]
