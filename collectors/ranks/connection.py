"""A rank's connection to the rendezvous server: sends and receives sealed lines of JSON, and matches answers."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from trainsentry.collectors.ranks.handshake import CHALLENGE_BYTES, PROOF_BYTES, TAG_BYTES, Caller, Refused, Seals

MOST_SHOWN: Final = 8
"""Ranks that a message lists; further ones are only counted, so that it stays one line."""


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ranks as text for a message.

    >>> ranks_named([3]), ranks_named([0, 2])
    ('rank 3', 'ranks 0, 2')
    >>> ranks_named(range(10))
    'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    more = len(ranks) - MOST_SHOWN
    shown = ", ".join(map(str, ranks[:MOST_SHOWN])) + (f" and {more} more" if more > 0 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


_TAG: Final = 2 * TAG_BYTES
"""Characters of the hexadecimal seal that starts each line."""


class SealedLines:
    """Packs and unpacks one side's messages: `pack` seals one to send, `feed` opens received bytes.

    A received line has at most `longest` bytes.
    """

    def __init__(self, seals: Seals, longest: int) -> None:
        self._seals = seals
        self._longest = longest
        self._inbox = bytearray()

    def pack(self, text: bytes) -> bytes:
        """Return the sealed line of a message; lines must be sent in the order they are packed."""
        return self._seals.seal(text).hex().encode() + text + b"\n"

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Add received bytes; yield the messages they complete.

        Raises:
            Refused: when a line has a wrong seal, holds no message, or is too long.

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
            message = json.loads(line[_TAG:])
        except (ValueError, RecursionError) as error:
            raise Refused(f"a malformed line: {type(error).__name__}") from None
        if not isinstance(message, dict) or not message:
            raise Refused("a line that holds no message")
        return message


def text_of(message: dict[str, Any]) -> bytes:
    """Return a message as text."""
    return json.dumps(message).encode()


_ROUNDS: Final = frozenset({"gather", "greatest"})
"""Requests that need every rank: none of them is answered once a rank has left."""

SERVER_HAS_LEFT: Final = "the rendezvous server on rank 0 has left"

LONGEST_ANSWER: Final = 2**28
"""Bytes of the server's longest message: the values of thousands of ranks, some 10 kB each."""


class RendezvousBroken(RuntimeError):
    """The ranks cannot reach each other, or one of them no longer takes part."""


class Connection:
    """A rank's connection to the rendezvous server.

    A thread receives the answers, so several threads can wait and send at the same time.
    """

    def __init__(self, sock: socket.socket, seals: Seals) -> None:
        self._sock = sock
        self._lines = SealedLines(seals, LONGEST_ANSWER)
        self._sending = threading.Lock()
        self._arrived = threading.Condition()
        self._answers: dict[tuple[str, int], Any] = {}
        self._lost: str | None = None
        self._gone: str | None = None
        threading.Thread(target=self._listen, name="trainsentry connection", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            RendezvousBroken: when the connection is broken.

        """
        try:
            with self._sending:
                self._sock.sendall(self._lines.pack(text_of(message)))
        except OSError as error:
            raise RendezvousBroken(f"{SERVER_HAS_LEFT} ({error})") from None

    def wait(self, kind: str, number: int, seconds: float) -> Any:
        """Return the answer to request `number` of a kind.

        Raises:
            RendezvousBroken: when it does not arrive within `seconds`, or when a rank has left.

        """
        key = (kind, number)
        with self._arrived:
            self._arrived.wait_for(lambda: key in self._answers or self._ended(kind) is not None, seconds)
            if key in self._answers:
                return self._answers.pop(key)
            reason = self._ended(kind)
        if reason is None and kind in _ROUNDS:
            self.send({"out": 1})  # so a late rank gets no answer either, and does not act on it alone
        raise RendezvousBroken(reason or f"the other ranks have not answered within {seconds:.0f} s")

    def _ended(self, kind: str) -> str | None:
        """Return why no answer of a kind can arrive any more; the store can be read after a rank has left."""
        return self._lost if kind == "read" else self._lost or self._gone

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _listen(self) -> None:
        lost = SERVER_HAS_LEFT
        try:
            while data := self._sock.recv(1 << 18):
                for message in self._lines.feed(data):
                    self._take(message)
        except ConnectionError:  # it left while a message of this rank was on its way
            pass
        except Exception as error:  # noqa: BLE001 - this thread's edge: the waiting threads raise it
            lost = f"the connection to the rendezvous server on rank 0 broke: {error}"
        with self._arrived:
            self._lost = lost
            self._arrived.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        with self._arrived:
            if "gone" in message:
                self._gone = f"{ranks_named(message['gone'])} left, or waits no longer"
            else:
                kind = next(iter(message))
                self._answers[kind, message[kind]] = message.get("given")
            self._arrived.notify_all()


def prove(sock: socket.socket, caller: Caller, seconds: float) -> Seals:
    """Run the caller's side of the handshake over a new connection; return the connection's seals.

    Raises:
        Refused: when the other side does not prove that it knows the secret, or closes the connection.
        OSError: when it does not answer within `seconds`, or the connection breaks.

    """
    end = time.monotonic() + seconds
    sock.sendall(caller.hello())
    sock.sendall(caller.answer(_read(sock, CHALLENGE_BYTES, end)))
    return caller.confirm(_read(sock, PROOF_BYTES, end))


def _read(sock: socket.socket, size: int, end: float) -> bytes:
    """Read exactly `size` bytes before the time `end`."""
    found = b""
    while len(found) < size:
        sock.settimeout(max(end - time.monotonic(), 0.001))
        data = sock.recv(size - len(found))
        if not data:
            raise Refused("the other side closed the connection")
        found += data
    return found
