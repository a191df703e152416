"""The end of a meeting that one rank holds: it hands round what the ranks of a run say to each other.

Each rank has one connection, over which lines of JSON go. Nothing here waits for a device or a collective.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from typing import Any, Final

LONGEST_LINE: Final = 2**24
"""Bytes of a message; a configuration has some ten thousand."""

SEND_SECONDS: Final = 10.0
"""How long a rank may leave its messages unread before it is let go."""

LOOK_SECONDS: Final = 0.1
"""How often the clock is looked at while nothing comes."""


class Hub:
    """Lets the ranks of `run` in, at most `size`, and answers them in a thread of its own until all have left.

    What every rank says under one number goes to all once the last has said it: the values themselves (`gather`), or
    the greatest of each (`greatest`). Words are kept (`put`) for whoever asks (`read`).
    """

    def __init__(self, listening: socket.socket, run: str, size: int, seconds: float) -> None:
        self.run = run
        self.size = size
        self._listening: socket.socket | None = listening
        self._end = time.monotonic() + seconds
        self._selector = selectors.DefaultSelector()
        self._inboxes: dict[socket.socket, bytearray] = {}
        self._ranks: dict[socket.socket, int] = {}
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
                    self._give_up()
        finally:
            for sock in [*self._inboxes]:
                self._drop(sock)
            self._close_door()
            self._selector.close()
            self._ended.set()

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):
            assert self._listening is not None
            sock, _ = self._listening.accept()
            sock.settimeout(SEND_SECONDS)
            self._inboxes[sock] = bytearray()
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
            self._drop(sock)
            return
        *lines, rest = inbox.split(b"\n")
        inbox[:] = rest
        for line in lines:
            try:
                self._answer(sock, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):  # none of ours
                self._drop(sock)
                return

    def _answer(self, sock: socket.socket, said: dict[str, Any]) -> None:
        if sock not in self._ranks:
            self._admit(sock, said)
        elif "put" in said:
            self._words[said["put"]] = said["text"]
        elif "read" in said:
            found = {key: text for key, text in self._words.items() if key.startswith(said["prefix"])}
            self._send(sock, {"read": said["read"], "given": found})
        else:
            kind = "gather" if "gather" in said else "greatest"
            self._take(sock, kind, said[kind], said["given"])

    def _admit(self, sock: socket.socket, said: dict[str, Any]) -> None:
        rank = int(said["rank"])
        if said["run"] != self.run or said["size"] != self.size or rank in self._ranks.values():
            self._drop(sock)
            return
        self._ranks[sock] = rank
        self._send(sock, {"welcome": rank})
        if len(self._ranks) == self.size:
            self._close_door()
            self._send_all({"here": 0, "given": []})

    def _give_up(self) -> None:
        """Tell those who have come who has not."""
        missing = sorted(set(range(self.size)) - set(self._ranks.values()))
        self._close_door()
        self._send_all({"here": 0, "given": missing})

    def _take(self, sock: socket.socket, kind: str, number: int, given: Any) -> None:
        told = self._told.setdefault((kind, number), {})
        told[self._ranks[sock]] = given
        if len(told) < self.size:
            if len(self._ranks) < self.size:
                self._send(sock, {"gone": self._gone()})
            return
        del self._told[kind, number]
        values = [told[rank] for rank in range(self.size)]
        if kind == "greatest":
            values = [max(column) for column in zip(*values, strict=True)]
        self._send_all({kind: number, "given": values})

    def _send_all(self, message: dict[str, Any]) -> None:
        for sock in [*self._ranks]:
            self._send(sock, message)

    def _send(self, sock: socket.socket, message: dict[str, Any]) -> None:
        try:
            sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        """Let a rank go; the others are told while they wait for it."""
        if self._inboxes.pop(sock, None) is None:
            return
        self._selector.unregister(sock)
        sock.close()
        if self._ranks.pop(sock, None) is not None and self._told:
            self._send_all({"gone": self._gone()})

    def _gone(self) -> list[int]:
        return sorted(set(range(self.size)) - set(self._ranks.values()))

    def _close_door(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            self._selector.unregister(listening)
            listening.close()
