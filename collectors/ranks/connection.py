"""A rank's connection to the rendezvous server: sealed lines of JSON, requests, and answers as they arrive."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from trainsentry.collectors.ranks.handshake import CHALLENGE_BYTES, PROOF_BYTES, TAG_BYTES, Caller, Refused, Seals

MOST_SHOWN: Final = 8
"""Ranks that are named; of more their number is told, so that a message about thousands stays one line."""


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> ranks_named([3]), ranks_named([0, 2])
    ('rank 3', 'ranks 0, 2')
    >>> ranks_named(range(10))
    'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    more = len(ranks) - MOST_SHOWN
    shown = ", ".join(map(str, ranks[:MOST_SHOWN])) + (f" and {more} more" if more > 0 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


_TAG: Final = 2 * TAG_BYTES
"""Characters of a seal, which stands in front of its line."""


class SealedLines:
    """One side of a connection: `pack` what is to be sent, `feed` what has come; no line is longer than `longest`."""

    def __init__(self, seals: Seals, longest: int) -> None:
        self._seals = seals
        self._longest = longest
        self._inbox = bytearray()

    def pack(self, text: bytes) -> bytes:
        """Return a line that holds a message; it must be the next one that is sent."""
        return self._seals.seal(text).hex().encode() + text + b"\n"

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that bytes complete.

        Raises:
            Refused: when one is not the other side's, or is none, or is too long.

        """
        self._inbox += data
        if b"\n" in data:
            *lines, rest = bytes(self._inbox).split(b"\n")
            self._inbox = bytearray(rest)
            for line in lines:
                yield self._opened(line)
        if len(self._inbox) > self._longest:
            raise Refused(f"a line of more than {self._longest} bytes")

    def _opened(self, line: bytes) -> dict[str, Any]:
        try:
            self._seals.check(bytes.fromhex(line[:_TAG].decode("ascii")), line[_TAG:])
            said = json.loads(line[_TAG:])
        except (ValueError, RecursionError) as error:
            raise Refused(f"a line that is none: {type(error).__name__}") from None
        if not isinstance(said, dict) or not said:
            raise Refused("a line that holds no message")
        return said


def text_of(message: dict[str, Any]) -> bytes:
    """Return a message as text."""
    return json.dumps(message).encode()


_ROUNDS: Final = frozenset({"gather", "greatest"})
"""What all ranks take part in, and some have waited for in vain once one has left."""


LONGEST_ANSWER: Final = 2**28
"""Bytes of what the rank that holds the meeting says: what thousands of ranks have given, some ten thousand each."""


class RendezvousBroken(RuntimeError):
    """The ranks cannot talk to each other, or one of them no longer takes part."""


class Connection:
    """A rank's connection to the hub; a thread takes what comes, so that no one who waits keeps others from asking."""

    def __init__(self, sock: socket.socket, seals: Seals) -> None:
        self._sock = sock
        self._lines = SealedLines(seals, LONGEST_ANSWER)
        self._sending = threading.Lock()
        self._came = threading.Condition()
        self._answers: dict[tuple[str, int], Any] = {}
        self._lost: str | None = None
        self._gone: str | None = None
        threading.Thread(target=self._listen, name="trainsentry line", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            MeetingBroken: when the connection is broken.

        """
        try:
            with self._sending:
                self._sock.sendall(self._lines.pack(text_of(message)))
        except OSError as error:
            raise RendezvousBroken(f"the rank that holds the meeting cannot be reached: {error}") from None

    def wait(self, kind: str, number: int, seconds: float) -> Any:
        """Return the answer to what was asked under a number.

        Raises:
            MeetingBroken: when it does not come in time, or when a rank has left.

        """
        key = (kind, number)
        with self._came:
            self._came.wait_for(lambda: key in self._answers or self._ended(kind) is not None, seconds)
            if key in self._answers:
                return self._answers.pop(key)
            reason = self._ended(kind)
        if reason is None and kind in _ROUNDS:
            self.send({"out": 1})  # whoever is late hears that no answer comes, and does not act on it alone
        raise RendezvousBroken(reason or f"the other ranks have not answered within {seconds:.0f} s")

    def _ended(self, kind: str) -> str | None:
        """Return why an answer of a kind cannot come any more; words can be read without those who have left."""
        return self._lost if kind == "read" else self._lost or self._gone

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _listen(self) -> None:
        lost = "the rank that holds the meeting has left"
        try:
            while data := self._sock.recv(1 << 18):
                for message in self._lines.feed(data):
                    self._take(message)
        except Exception as error:  # noqa: BLE001 - this thread's edge: whoever waits is told
            lost = f"the connection to the rank that holds the meeting broke: {error}"
        with self._came:
            self._lost = lost
            self._came.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        with self._came:
            if "gone" in message:
                self._gone = f"{ranks_named(message['gone'])} left, or waits no longer"
            else:
                kind = next(iter(message))
                self._answers[kind, message[kind]] = message.get("given")
            self._came.notify_all()


def prove(sock: socket.socket, caller: Caller, seconds: float) -> Seals:
    """Prove to whoever is behind a connection that this is a rank of the run, and have it do the same.

    Raises:
        Refused: when it cannot.
        OSError: when it does not in time, or hangs up.

    """
    end = time.monotonic() + seconds
    sock.sendall(caller.hello())
    sock.sendall(caller.answer(_read(sock, CHALLENGE_BYTES, end)))
    return caller.confirm(_read(sock, PROOF_BYTES, end))


def _read(sock: socket.socket, size: int, end: float) -> bytes:
    """Read so many bytes, and no more, until a time."""
    found = b""
    while len(found) < size:
        sock.settimeout(max(end - time.monotonic(), 0.001))
        data = sock.recv(size - len(found))
        if not data:
            raise Refused("the other side has hung up")
        found += data
    return found
