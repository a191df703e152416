"""The end of a meeting that one rank holds: it hands round what the ranks of a run say to each other.

Each rank has one connection, over which lines of JSON go. Nothing here waits for a device or a collective.
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
import weakref
from typing import Any, Final

LONGEST_LINE: Final = 2**24
"""Bytes of a message; a configuration has some ten thousand."""

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


class Hub:
    """Lets the ranks of `run` in, at most `size`, and answers them in a thread of its own until all have left.

    What every rank says under one number goes to all once the last has said it: the values themselves (`gather`), or
    the greatest of each (`greatest`). Once a rank has left, or has given up waiting (`out`), no such round ends any
    more, and all are told so. Words are kept (`put`) for whoever asks (`read`).
    """

    def __init__(self, listening: socket.socket, run: str, size: int, seconds: float) -> None:
        self.run = run
        self.size = size
        self._listening: socket.socket | None = listening
        self._end = time.monotonic() + seconds
        self._selector = selectors.DefaultSelector()
        self._inboxes: dict[socket.socket, bytearray] = {}
        self._calling: dict[socket.socket, int] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._out: set[int] = set()
        self._dead: list[socket.socket] = []
        self._told: dict[tuple[str, int], dict[int, Any]] = {}
        self._words: dict[str, str] = {}
        self._ended = threading.Event()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="trainsentry meeting", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait until all ranks have left, so that none is cut off by the end of this process."""
        self._ended.wait(seconds)

    def _serve(self) -> None:
        try:
            while self._listening is not None or self._ranks:
                for key, _ in self._selector.select(LOOK_SECONDS):
                    if key.fileobj is self._listening:
                        self._let_in()
                    else:
                        self._hear(key.fileobj)  # type: ignore[arg-type]
                if self._listening is not None and time.monotonic() > self._end:
                    self._settle()
                self._drop_dead()
        finally:
            self._ranks.clear()
            self._close_door()
            self._selector.close()
            self._ended.set()

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):
            assert self._listening is not None
            sock, _ = self._listening.accept()
            sock.settimeout(SEND_SECONDS)
            self._inboxes[kept_from_children(sock)] = bytearray()
            self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, sock: socket.socket) -> None:
        inbox = self._inboxes.get(sock)
        if inbox is None:
            return  # it was let go while others were answered
        try:
            data = sock.recv(1 << 18)
        except OSError:
            data = b""
        inbox += data
        if not data or len(inbox) > LONGEST_LINE:
            self._dead.append(sock)
            return
        *lines, rest = inbox.split(b"\n")
        inbox[:] = rest
        for line in lines:
            try:
                self._answer(sock, json.loads(line))
            except Exception:  # noqa: BLE001 - a stranger may say anything
                self._dead.append(sock)
                return

    def _answer(self, sock: socket.socket, said: dict[str, Any]) -> None:
        if sock not in self._ranks:
            self._admit(sock, said)
        elif "put" in said:
            self._words[said["put"]] = said["text"]
        elif "read" in said:
            found = {key: text for key, text in self._words.items() if key.startswith(said["prefix"])}
            self._send(sock, {"read": said["read"], "given": found})
        elif "out" in said:
            self._out.add(self._ranks[sock])
            self._end_rounds()
        else:
            kind = "gather" if "gather" in said else "greatest"
            self._take(sock, kind, said[kind], said["given"])

    def _admit(self, sock: socket.socket, said: dict[str, Any]) -> None:
        """Let a rank in once it has heard that it is welcome: one that was kept waiting may have called anew."""
        if "ready" in said:
            rank = self._calling.pop(sock)
            if rank in self._ranks.values():
                self._dead.append(sock)
                return
            self._ranks[sock] = rank
            if len(self._ranks) == self.size:
                self._settle()
            return
        known = said["run"] == self.run and said["size"] == self.size and said["rank"] in range(self.size)
        if not known or said["rank"] in self._ranks.values():
            self._dead.append(sock)
            return
        self._calling[sock] = said["rank"]
        self._send(sock, {"welcome": said["rank"]})

    def _settle(self) -> None:
        """Let nobody in any more, and tell those who have come who has not."""
        missing = self._gone()
        self._close_door()
        self._send_all({"here": 0, "given": missing})

    def _take(self, sock: socket.socket, kind: str, number: int, given: Any) -> None:
        if len(self._ranks) < self.size or self._out:
            self._send(sock, {"gone": self._gone()})
            return
        told = self._told.setdefault((kind, number), {})
        told[self._ranks[sock]] = given
        if len(told) < self.size:
            return
        del self._told[kind, number]
        values = [told[rank] for rank in range(self.size)]
        if kind == "greatest":
            values = [max(column) for column in zip(*values, strict=True)]
        self._send_all({kind: number, "given": values})

    def _end_rounds(self) -> None:
        """Tell those who wait that somebody is gone."""
        if self._told:
            self._told.clear()
            self._send_all({"gone": self._gone()})

    def _send_all(self, message: dict[str, Any]) -> None:
        line = _line_of(message)
        for sock in self._ranks:
            self._send_line(sock, line)

    def _send(self, sock: socket.socket, message: dict[str, Any]) -> None:
        self._send_line(sock, _line_of(message))

    def _send_line(self, sock: socket.socket, line: bytes) -> None:
        try:
            sock.sendall(line)
        except OSError:
            self._dead.append(sock)

    def _drop_dead(self) -> None:
        """Let go of connections that are over; the others are told while they wait for them."""
        while self._dead:
            sock = self._dead.pop()
            if self._inboxes.pop(sock, None) is None:
                continue
            self._selector.unregister(sock)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
            self._calling.pop(sock, None)
            if self._ranks.pop(sock, None) is not None:
                self._end_rounds()

    def _gone(self) -> list[int]:
        return sorted(set(range(self.size)) - set(self._ranks.values()) | self._out)

    def _close_door(self) -> None:
        """Let no one in any more, and those go who never said who they are."""
        listening, self._listening = self._listening, None
        if listening is not None:
            self._selector.unregister(listening)
            listening.close()
        self._dead += [sock for sock in self._inboxes if sock not in self._ranks]
        self._drop_dead()


def _line_of(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
