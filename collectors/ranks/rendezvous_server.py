"""The end of a meeting that one rank holds: it hands round what the ranks of a run say to each other.

Each rank has one connection, over which sealed lines of JSON go. Nothing here waits for a device or a collective.
"""

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from typing import Any, Final

from trainsentry.collectors.ranks.connection import SealedLines, text_of
from trainsentry.collectors.ranks.rounds import Rounds, StoredWords, is_number
from trainsentry.collectors.ranks.unproven_callers import MOST_STRANGERS, ProvenCaller, UnprovenCallers

LONGEST_LINE: Final = 2**20
"""Bytes of what a rank says; a configuration has some ten thousand."""

SEND_SECONDS: Final = 10.0
"""How long a rank may leave its messages unread before it is let go."""

LOOK_SECONDS: Final = 0.1
"""How often the clock is looked at while nothing comes."""


_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def kept_from_children(sock: socket.socket) -> socket.socket:
    """Return a socket that a forked child closes: in a data loader's worker it would outlive its rank unnoticed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _sockets.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class RendezvousServer:
    """Lets the ranks of a run in, `size` of them, and answers them in a thread of its own until all have left.

    Who calls has to prove that it knows the run's secret before anything that it says is looked at. What every rank
    says under one number goes to all once the last has said it: the values themselves (`gather`), or the greatest of
    each (`greatest`). Once a rank has left, or has given up waiting (`out`), no such round ends any more, and all are
    told so. Words are kept (`put`) for whoever asks (`read`). `seed`, which is no secret, is told to all as they come.
    """

    def __init__(self, listening: socket.socket, secret: bytes, purpose: str, size: int, seconds: float) -> None:
        self.size = size
        self.seed = os.urandom(32).hex()
        self._end = time.monotonic() + seconds
        strangers = UnprovenCallers(kept_from_children(listening), secret, purpose, most=MOST_STRANGERS + size)
        self._strangers: UnprovenCallers | None = strangers
        self._selector = selectors.DefaultSelector()
        self._watched: set[socket.socket] = set()
        self._lines: dict[socket.socket, SealedLines] = {}
        self._calling: dict[socket.socket, int] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._out: set[int] = set()
        self._dead: list[socket.socket] = []
        self._rounds = Rounds(size)
        self._words = StoredWords()
        self._ended = threading.Event()
        threading.Thread(target=self._serve, name="trainsentry meeting", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait until all ranks have left, so that none is cut off by the end of this process."""
        self._ended.wait(seconds)

    def _serve(self) -> None:
        try:
            while self._strangers is not None or self._ranks:
                self._watch()
                for key, _ in self._selector.select(LOOK_SECONDS):
                    if key.fileobj in self._lines:
                        self._hear(key.fileobj)
                self._let_in()
                if self._strangers is not None and time.monotonic() > self._end:
                    self._settle()
                self._drop_dead()
        finally:
            self._ranks.clear()
            self._close_endpoint()
            self._selector.close()
            self._ended.set()

    def _watch(self) -> None:
        """Have the selector look at the sockets that there are now."""
        if self._strangers is None and len(self._watched) == len(self._lines):
            return
        now = {*self._lines, *(self._strangers.sockets if self._strangers is not None else ())}
        for sock in self._watched - now:
            self._selector.unregister(sock)
        for sock in now - self._watched:
            self._selector.register(sock, selectors.EVENT_READ)
        self._watched = now

    def _let_in(self) -> None:
        """Take in who has proven to belong to the run, and is not there already."""
        if self._strangers is None:
            return
        for caller in self._strangers.proven():
            self._greet(caller)

    def _greet(self, caller: ProvenCaller) -> None:
        if caller.rank >= self.size or caller.rank in self._ranks.values():
            caller.sock.close()
            return
        self._dead += [sock for sock, rank in self._calling.items() if rank == caller.rank]  # it has called anew
        sock = kept_from_children(caller.sock)
        sock.settimeout(SEND_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines[sock] = SealedLines(caller.seals, LONGEST_LINE)
        self._calling[sock] = caller.rank
        self._send_bytes(sock, caller.proof)

    def _hear(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self._dead.append(sock)
            return
        try:
            for said in self._lines[sock].feed(data):
                self._answer(sock, said)
        except Exception:  # noqa: BLE001 - a rank whose words make no sense costs nobody else anything
            self._dead.append(sock)

    def _answer(self, sock: socket.socket, said: dict[str, Any]) -> None:
        if sock not in self._ranks:
            self._admit(sock, said)
        elif "put" in said:
            self._words.put(self._ranks[sock], said["put"], said["text"])
        elif "read" in said:
            self._send(sock, {"read": is_number(said["read"]), "given": self._words.under(said["prefix"])})
        elif "out" in said:
            self._out.add(self._ranks[sock])
            self._end_rounds()
        else:
            kind = "gather" if "gather" in said else "greatest"
            self._take(sock, kind, is_number(said[kind]), said["given"])

    def _admit(self, sock: socket.socket, said: dict[str, Any]) -> None:
        """Let a rank in once it has heard that it is welcome: one that was kept waiting may have called anew."""
        rank = self._calling.pop(sock)
        if "ready" not in said or rank in self._ranks.values():
            self._dead.append(sock)
            return
        self._ranks[sock] = rank
        if len(self._ranks) == self.size:
            self._settle()

    def _settle(self) -> None:
        """Let nobody in any more, and tell those who have come who has not."""
        missing = self._gone()
        self._close_endpoint()
        self._send_all({"here": 0, "given": {"missing": missing, "seed": self.seed}})

    def _take(self, sock: socket.socket, kind: str, number: int, given: Any) -> None:
        if len(self._ranks) < self.size or self._out:
            self._send(sock, {"gone": self._gone()})
            return
        self._rounds.take(kind, number, self._ranks[sock], given)
        odd = self._rounds.odd(kind, number)
        if odd:
            self._dead += [other for other, rank in self._ranks.items() if rank in odd]
        elif (values := self._rounds.ended(kind, number)) is not None:
            self._send_all({kind: number, "given": values})

    def _end_rounds(self) -> None:
        """Tell those who wait that somebody is gone."""
        if self._rounds.open:
            self._rounds.forget()
            self._send_all({"gone": self._gone()})

    def _send_all(self, message: dict[str, Any]) -> None:
        text = text_of(message)
        for sock in self._ranks:
            self._send_bytes(sock, self._lines[sock].pack(text))

    def _send(self, sock: socket.socket, message: dict[str, Any]) -> None:
        self._send_bytes(sock, self._lines[sock].pack(text_of(message)))

    def _send_bytes(self, sock: socket.socket, data: bytes) -> None:
        try:
            sock.sendall(data)
        except OSError:
            self._dead.append(sock)

    def _drop_dead(self) -> None:
        """Let go of connections that are over; the others are told while they wait for them."""
        while self._dead:
            sock = self._dead.pop()
            if self._lines.pop(sock, None) is None:
                continue
            if sock in self._watched:
                self._watched.remove(sock)
                self._selector.unregister(sock)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
            self._calling.pop(sock, None)
            if self._ranks.pop(sock, None) is not None:
                self._end_rounds()

    def _gone(self) -> list[int]:
        return sorted(set(range(self.size)) - set(self._ranks.values()) | self._out)

    def _close_endpoint(self) -> None:
        """Let no one in any more, and those go who never said who they are."""
        strangers, self._strangers = self._strangers, None
        if strangers is not None:
            for sock in self._watched - self._lines.keys():
                self._selector.unregister(sock)
            self._watched &= self._lines.keys()
            strangers.close()
        self._dead += [sock for sock in self._lines if sock not in self._ranks]
        self._drop_dead()
