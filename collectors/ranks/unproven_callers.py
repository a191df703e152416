"""Those who call and have not proven yet that they belong to the run: few, for a short time, unheard."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from trainsentry.collectors.ranks.handshake import HELLO_BYTES, PROOF_BYTES, Callee, Refused, Seals

MOST_STRANGERS: Final = 64
"""Callers that are waited for at once where few are expected: a recorder has 15 children at most."""

STRANGER_SECONDS: Final = 5.0
"""How long a caller may take to prove itself: it has two things to say, each at once."""

ACCEPTED_AT_ONCE: Final = 128
"""Callers that are let in before what is connected has its turn: as many as the system keeps waiting."""

PAUSE_SECONDS: Final = 0.5
"""How long nobody is let in once this process has no descriptor left for another connection."""


@dataclass(frozen=True)
class ProvenCaller:
    """A caller that has proven that it belongs to the run; `proof` is what it is to be sent first, for it waits."""

    sock: socket.socket
    rank: int
    seals: Seals
    proof: bytes


@dataclass
class _Stranger:
    """A caller: what it has said of the message that it is to say now, and since when it is here."""

    sock: socket.socket
    callee: Callee
    since: float
    inbox: bytearray = field(default_factory=bytearray)
    challenged: bool = False

    @property
    def lacks(self) -> int:
        """Bytes that are awaited: no more are ever read."""
        return (PROOF_BYTES if self.challenged else HELLO_BYTES) - len(self.inbox)


class UnprovenCallers:
    """Listens for callers, and has each prove that it knows the secret before anything it says is looked at.

    When there are more than `most`, one that has said nothing goes first, else the one that has been here longest: who
    belongs to the run calls again.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: bytes,
        purpose: str,
        clock: Callable[[], float] = time.monotonic,
        most: int = MOST_STRANGERS,
    ) -> None:
        self._listening = listening
        self._listening.setblocking(False)
        self._secret = secret
        self._purpose = purpose
        self._clock = clock
        self._most = most
        self._here: list[_Stranger] = []
        self._pause_until = clock()

    def __len__(self) -> int:
        return len(self._here)

    @property
    def sockets(self) -> list[socket.socket]:
        """What a selector is to watch; the door is not among it while nobody can be let in."""
        callee = [self._listening] if self._clock() >= self._pause_until else []
        return [*callee, *(stranger.sock for stranger in self._here)]

    def proven(self) -> Iterator[ProvenCaller]:
        """Let callers in, hear those that are here, and yield those that belong to the run."""
        self._accept()
        for stranger in list(self._here):
            try:
                proven = self._hear(stranger)
            except (OSError, Refused):
                self._turn_away(stranger)
                continue
            if proven is not None:
                self._here.remove(stranger)
                yield proven
            elif self._clock() - stranger.since >= STRANGER_SECONDS:
                self._turn_away(stranger)

    def close(self) -> None:
        """Turn everybody away and listen no more."""
        for stranger in list(self._here):
            self._turn_away(stranger)
        self._listening.close()

    def _accept(self) -> None:
        if self._clock() < self._pause_until:
            return
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:  # no descriptor is left
                self._make_room()
                self._pause_until = self._clock() + PAUSE_SECONDS
                return
            if len(self._here) >= self._most:
                self._make_room()
            self._take_in(sock)

    def _take_in(self, sock: socket.socket) -> None:
        """Take a caller in and hear it: who belongs to the run has said its first word by now, and is not silent."""
        sock.setblocking(False)
        stranger = _Stranger(sock, Callee(self._secret, self._purpose), self._clock())
        self._here.append(stranger)
        try:
            self._hear(stranger)
        except (OSError, Refused):
            self._turn_away(stranger)

    def _make_room(self) -> None:
        if self._here:
            silent = [stranger for stranger in self._here if not stranger.challenged]
            self._turn_away((silent or self._here)[0])

    def _hear(self, stranger: _Stranger) -> ProvenCaller | None:
        """Read what a caller has said; return it once it has proven itself.

        Raises:
            OSError: when it has gone.
            Refused: when it does not belong to the run.

        """
        while True:
            try:
                data = stranger.sock.recv(stranger.lacks)
            except (BlockingIOError, InterruptedError):
                return None
            if not data:
                raise ConnectionResetError
            stranger.inbox += data
            if stranger.lacks > 0:
                continue
            said = bytes(stranger.inbox)
            stranger.inbox.clear()
            if stranger.challenged:
                proof, seals = stranger.callee.admit(said)
                return ProvenCaller(stranger.sock, stranger.callee.rank, seals, proof)
            stranger.sock.send(stranger.callee.challenge(said))
            stranger.challenged = True
            return None

    def _turn_away(self, stranger: _Stranger) -> None:
        self._here.remove(stranger)
        with contextlib.suppress(OSError):
            stranger.sock.close()
