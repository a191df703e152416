"""Callers that have not yet proven that they know the run secret: limited in number, time and bytes read."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from trainsentry.collectors.ranks.handshake import HELLO_BYTES, PROOF_BYTES, Callee, Refused, Seals

MOST_UNPROVEN: Final = 64
"""Unproven callers at once, where few are expected: a recorder has at most 15 children."""

PROOF_SECONDS: Final = 5.0
"""How long a caller may take to prove itself: it sends two messages, each without delay."""

ACCEPTED_AT_ONCE: Final = 128
"""Callers accepted before existing connections have their turn: the length of the system's queue."""

PAUSE_SECONDS: Final = 0.5
"""How long no caller is accepted once this process has no file descriptor left."""


@dataclass(frozen=True)
class ProvenCaller:
    """A caller that knows the run secret; it waits for `proof`, which must be the first bytes sent to it."""

    sock: socket.socket
    rank: int
    seals: Seals
    proof: bytes


@dataclass
class _UnprovenCaller:
    """A caller during the handshake: the bytes received of its current message, and the time it called."""

    sock: socket.socket
    callee: Callee
    since: float
    inbox: bytearray = field(default_factory=bytearray)
    challenged: bool = False

    @property
    def missing(self) -> int:
        """Bytes missing of the current message; no more are ever read."""
        return (PROOF_BYTES if self.challenged else HELLO_BYTES) - len(self.inbox)


class UnprovenCallers:
    """Listens for callers, and has each prove that it knows the secret before any of its messages is parsed.

    When there are more than `most`, a silent caller is closed first, else the oldest: a rank of the run calls again.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: bytes,
        purpose: str,
        clock: Callable[[], float] = time.monotonic,
        most: int = MOST_UNPROVEN,
    ) -> None:
        self._listening = listening
        self._listening.setblocking(False)
        self._secret = secret
        self._purpose = purpose
        self._clock = clock
        self._most = most
        self._callers: list[_UnprovenCaller] = []
        self._pause_until = clock()

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets that a selector must watch; the listening one only while callers can be accepted."""
        listening = [self._listening] if self._clock() >= self._pause_until else []
        return [*listening, *(caller.sock for caller in self._callers)]

    def proven(self) -> Iterator[ProvenCaller]:
        """Accept callers, continue their handshakes, and yield those that have proven themselves."""
        self._accept()
        for caller in list(self._callers):
            try:
                proven = self._receive(caller)
            except (OSError, Refused):
                self._drop(caller)
                continue
            if proven is not None:
                self._callers.remove(caller)
                yield proven
            elif self._clock() - caller.since >= PROOF_SECONDS:
                self._drop(caller)

    def close(self) -> None:
        """Close every caller's connection, and stop listening."""
        for caller in list(self._callers):
            self._drop(caller)
        self._listening.close()

    def _accept(self) -> None:
        if self._clock() < self._pause_until:
            return
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:  # no file descriptor is left
                self._make_room()
                self._pause_until = self._clock() + PAUSE_SECONDS
                return
            if len(self._callers) >= self._most:
                self._make_room()
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        """Begin a caller's handshake: a rank of the run has sent its first message by now, so it is not silent."""
        sock.setblocking(False)
        caller = _UnprovenCaller(sock, Callee(self._secret, self._purpose), self._clock())
        self._callers.append(caller)
        try:
            self._receive(caller)
        except (OSError, Refused):
            self._drop(caller)

    def _make_room(self) -> None:
        if self._callers:
            silent = [caller for caller in self._callers if not caller.challenged]
            self._drop((silent or self._callers)[0])

    def _receive(self, caller: _UnprovenCaller) -> ProvenCaller | None:
        """Read a caller's bytes; return the caller once it has proven itself.

        Raises:
            OSError: when the connection has ended.
            Refused: when the caller does not know the secret.

        """
        while True:
            try:
                data = caller.sock.recv(caller.missing)
            except (BlockingIOError, InterruptedError):
                return None
            if not data:
                raise ConnectionResetError
            caller.inbox += data
            if caller.missing > 0:
                continue
            message = bytes(caller.inbox)
            caller.inbox.clear()
            if caller.challenged:
                proof, seals = caller.callee.admit(message)
                return ProvenCaller(caller.sock, caller.callee.rank, seals, proof)
            caller.sock.send(caller.callee.challenge(message))
            caller.challenged = True
            return None

    def _drop(self, caller: _UnprovenCaller) -> None:
        self._callers.remove(caller)
        with contextlib.suppress(OSError):
            caller.sock.close()
