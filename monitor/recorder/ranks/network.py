"""Sockets between the recorders of several ranks; never blocks, and keeps unsent messages up to a limit."""

import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from trainsentry.collectors.ranks.unproven_callers import UnprovenCallers
from trainsentry.monitor.recorder.ranks.framing import JSON, FramedConnection
from trainsentry.monitor.recorder.ranks.parent_call import ParentCall
from trainsentry.monitor.recorder.ranks.tree_position import TreePosition, purpose_of

RETRY_SECONDS: Final = 0.5
"""Seconds between two calls to a parent that does not answer yet."""

AGAIN_SECONDS: Final = 5.0
"""Seconds to call a parent that was connected before or refuses connections; a successor starts within a second."""

PATIENCE_SECONDS: Final = 60.0
"""Seconds to call a parent or wait for a child: ranks start at most a minute apart."""


def new_selector() -> selectors.BaseSelector:
    """Return a selector that needs no descriptor itself, if available, as it works when no descriptor is left."""
    made: selectors.BaseSelector = getattr(selectors, "PollSelector", selectors.DefaultSelector)()
    return made


class Network:
    """The recorder's connections to its parent and from its authenticated children."""

    def __init__(self, position: TreePosition, clock: Callable[[], float] = time.monotonic) -> None:
        self.position = position
        self.parent: FramedConnection | None = None
        self.children: dict[int, FramedConnection] = {}
        self.banned: set[int] = set()
        self.lost_parent = False
        self._clock = clock
        self._began = self._started = clock()
        self._patience = PATIENCE_SECONDS
        self._tried = -RETRY_SECONDS
        self._call: ParentCall | None = None
        self._strangers: UnprovenCallers | None = None
        if position.descriptor >= 0 and position.children:
            recorder_address = socket.socket(fileno=position.descriptor)
            self._strangers = UnprovenCallers(
                recorder_address, position.secret.encode(), purpose_of(position.rank), clock
            )

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the sockets for the events that they wait for."""
        if self._strangers is not None:
            for sock in self._strangers.sockets:
                selector.register(sock, selectors.EVENT_READ)
        if self._call is not None:
            selector.register(self._call.sock, selectors.EVENT_READ if self._call.connected else selectors.EVENT_WRITE)
        for link in self._links():
            selector.register(link.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outbox else 0))

    def pump(self) -> Iterator[tuple[int, int, bytes]]:
        """Send and receive without waiting; yield (sender's rank, kind, message)."""
        self._call_parent()
        self._let_in()
        for link in list(self._links()):
            link.send()
            yield from ((link.rank, kind, data) for kind, data in link.receive())
        self._drop_closed()

    @property
    def awaited(self) -> bool:
        """Whether to wait for children that have not connected yet."""
        return self._clock() - self._started < PATIENCE_SECONDS

    def lose_parent(self) -> None:
        """Continue without the parent, and do not call it again."""
        self.lost_parent = True
        if self.parent is not None:
            self.parent.closed = True

    def ban(self, rank: int) -> None:
        """Disconnect a child for good."""
        self.banned.add(rank)
        if rank in self.children:
            self.children[rank].closed = True

    def tell_parent(self, message: dict[str, Any]) -> None:
        """Send a message up."""
        self.send_up(JSON, json.dumps(message).encode())

    def send_up(self, kind: int, data: bytes) -> None:
        """Send bytes up; unsent bytes are lost if the connection closes.

        Raises:
            ValueError: when the message is larger than the parent accepts.

        """
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
        """Send a message to one child, if it is connected."""
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
        if self._strangers is not None:
            self._strangers.close()
        if self._call is not None:
            self._call.close()
        self.parent, self._strangers, self._call = None, None, None
        self.children.clear()

    def _links(self) -> Iterator[FramedConnection]:
        if self.parent is not None:
            yield self.parent
        yield from self.children.values()

    def _call_parent(self) -> None:
        """Call the parent, which may not listen yet, or be a successor that is just starting."""
        address = self.position.parent
        if address is None or self.parent is not None or self.lost_parent:
            return
        if self._call is None:
            if self._clock() - self._tried < RETRY_SECONDS:
                return
            self._tried = self._clock()
            try:
                self._call = ParentCall(address, self.position.rank)
            except OSError:  # out of descriptors
                self.lost_parent = self._clock() - self._began >= self._patience
                return
        self.parent = self._call.advance()
        if self.parent is not None:
            self._call = None
            return
        if self._call.failed and not self._call.connected:
            # Ranks listen before they publish their address, so one that refuses has stopped listening.
            self._patience = min(self._patience, AGAIN_SECONDS)
        # If the socket accepts, a recorder is starting there: wait for it as long as at the start.
        patience = PATIENCE_SECONDS if self._call.connected and not self._call.failed else self._patience
        waited = self._clock() - self._began >= patience
        if waited and not self._call.failed and self._call.connected:
            self._call.close()
        if self._call.failed:
            self._call = None
            self.lost_parent = waited

    def _let_in(self) -> None:
        """Accept authenticated callers: a child, or a child's successor."""
        if self._strangers is None:
            return
        for child in self._strangers.proven():
            if child.rank not in self.position.children or child.rank in self.banned:
                child.sock.close()
                continue
            if child.rank in self.children:
                self.children[child.rank].sock.close()
            self.children[child.rank] = FramedConnection(
                child.sock, child.rank, child.seals, outbox=bytearray(child.proof)
            )

    def _drop_closed(self) -> None:
        if self.parent is not None and self.parent.closed:
            self.parent.sock.close()
            self.parent, self._tried, self._began = None, self._clock(), self._clock()
            self._patience = AGAIN_SECONDS
        for rank in [rank for rank, link in self.children.items() if link.closed]:
            self.children.pop(rank).sock.close()
