"""The rendezvous server on rank 0: runs the ranks' exchanges and max-reduces, and holds their store.

Each rank has one connection that carries sealed lines of JSON. Nothing here waits for a device or a collective.
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
from trainsentry.collectors.ranks.rounds import Rounds, StoreEntries, checked_number
from trainsentry.collectors.ranks.unproven_callers import MOST_UNPROVEN, ProvenCaller, UnprovenCallers

LONGEST_LINE: Final = 2**20
"""Bytes of a rank's longest message; a configuration has some ten thousand."""

SEND_SECONDS: Final = 10.0
"""How long a rank may leave its messages unread before it is disconnected."""

POLL_SECONDS: Final = 0.1
"""How often the server checks the clock while no message arrives."""


_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def kept_from_children(sock: socket.socket) -> socket.socket:
    """Have forked children close a socket; return it. In a data loader's worker it would outlive its rank unnoticed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _sockets.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class RendezvousServer:
    """Admits the `size` ranks of a run, and answers them in its own thread until all have left.

    A caller must prove that it knows the run secret before any of its messages is parsed. A round has a number and
    ends when every rank has given its value: all ranks then get the values (`gather`), or their element-wise maximum
    (`greatest`). Once a rank has left or has given up waiting (`out`), no round ends any more, and all ranks are told.
    `put` stores a text, `read` returns texts. Every rank gets `seed`, which is not secret, when all have joined.
    """

    def __init__(self, listening: socket.socket, secret: bytes, purpose: str, size: int, seconds: float) -> None:
        self.size = size
        self.seed = os.urandom(32).hex()
        self._end = time.monotonic() + seconds
        unproven = UnprovenCallers(kept_from_children(listening), secret, purpose, most=MOST_UNPROVEN + size)
        self._unproven: UnprovenCallers | None = unproven
        self._selector = selectors.DefaultSelector()
        self._watched: set[socket.socket] = set()
        self._lines: dict[socket.socket, SealedLines] = {}
        self._calling: dict[socket.socket, int] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._out: set[int] = set()
        self._dead: list[socket.socket] = []
        self._rounds = Rounds(size)
        self._entries = StoreEntries()
        self._ended = threading.Event()
        threading.Thread(target=self._serve, name="trainsentry rendezvous", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait until all ranks have left, so that the end of this process cuts none of them off."""
        self._ended.wait(seconds)

    def _serve(self) -> None:
        try:
            while self._unproven is not None or self._ranks:
                self._watch()
                for key, _ in self._selector.select(POLL_SECONDS):
                    if key.fileobj in self._lines:
                        self._receive(key.fileobj)
                self._accept()
                if self._unproven is not None and time.monotonic() > self._end:
                    self._settle()
                self._drop_dead()
        finally:
            self._ranks.clear()
            self._close_endpoint()
            self._selector.close()
            self._ended.set()

    def _watch(self) -> None:
        """Register the current sockets with the selector."""
        if self._unproven is None and len(self._watched) == len(self._lines):
            return
        now = {*self._lines, *(self._unproven.sockets if self._unproven is not None else ())}
        for sock in self._watched - now:
            self._selector.unregister(sock)
        for sock in now - self._watched:
            self._selector.register(sock, selectors.EVENT_READ)
        self._watched = now

    def _accept(self) -> None:
        """Accept the callers that have proven themselves, unless their rank is there already."""
        if self._unproven is None:
            return
        for caller in self._unproven.proven():
            self._greet(caller)

    def _greet(self, caller: ProvenCaller) -> None:
        if caller.rank >= self.size or caller.rank in self._ranks.values():
            caller.sock.close()
            return
        self._dead += [sock for sock, rank in self._calling.items() if rank == caller.rank]  # it has called again
        sock = kept_from_children(caller.sock)
        sock.settimeout(SEND_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines[sock] = SealedLines(caller.seals, LONGEST_LINE)
        self._calling[sock] = caller.rank
        self._send_bytes(sock, caller.proof)

    def _receive(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self._dead.append(sock)
            return
        try:
            for message in self._lines[sock].feed(data):
                self._answer(sock, message)
        except Exception:  # noqa: BLE001 - a malformed message costs its sender the connection, and no other rank anything
            self._dead.append(sock)

    def _answer(self, sock: socket.socket, message: dict[str, Any]) -> None:
        if sock not in self._ranks:
            self._admit(sock, message)
        elif "put" in message:
            self._entries.put(self._ranks[sock], message["put"], message["text"])
        elif "read" in message:
            number = checked_number(message["read"])
            self._send(sock, {"read": number, "given": self._entries.under(message["prefix"])})
        elif "out" in message:
            self._out.add(self._ranks[sock])
            self._end_rounds()
        else:
            kind = "gather" if "gather" in message else "greatest"
            self._take(sock, kind, checked_number(message[kind]), message["given"])

    def _admit(self, sock: socket.socket, message: dict[str, Any]) -> None:
        """Admit a rank once it confirms that it received the proof: one that waited too long may have called again."""
        rank = self._calling.pop(sock)
        if "ready" not in message or rank in self._ranks.values():
            self._dead.append(sock)
            return
        self._ranks[sock] = rank
        if len(self._ranks) == self.size:
            self._settle()

    def _settle(self) -> None:
        """Stop admitting ranks, and tell those that have joined which ranks are missing."""
        missing = self._gone()
        self._close_endpoint()
        self._send_all({"here": 0, "given": {"missing": missing, "seed": self.seed}})

    def _take(self, sock: socket.socket, kind: str, number: int, given: Any) -> None:
        if len(self._ranks) < self.size or self._out:
            self._send(sock, {"gone": self._gone()})
            return
        self._rounds.take(kind, number, self._ranks[sock], given)
        misfits = self._rounds.misfits(kind, number)
        if misfits:
            self._dead += [other for other, rank in self._ranks.items() if rank in misfits]
        elif (values := self._rounds.result(kind, number)) is not None:
            self._send_all({kind: number, "given": values})

    def _end_rounds(self) -> None:
        """Tell the ranks in open rounds that a rank has left."""
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
        """Close dead connections; ranks in open rounds are told."""
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
        """Stop listening, and close the connections of callers that were not admitted."""
        unproven, self._unproven = self._unproven, None
        if unproven is not None:
            for sock in self._watched - self._lines.keys():
                self._selector.unregister(sock)
            self._watched &= self._lines.keys()
            unproven.close()
        self._dead += [sock for sock in self._lines if sock not in self._ranks]
        self._drop_dead()
