"""Ranks that meet over sockets of the monitor's own: for a framework whose exchanges all wait for the device."""

import contextlib
import socket
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainsentry.collectors.meeting_hub import Hub, kept_from_children
from trainsentry.collectors.rank_names import ranks_named
from trainsentry.collectors.socket_line import Line, MeetingBroken

MEETING_SECONDS: Final = 60.0
"""How long the ranks wait for the last one to call `watch`: models are built and loaded at different speed."""

EXCHANGE_SECONDS: Final = 180.0
"""How long an exchange may take. Ranks that train together are a step apart at most when one begins."""

BOARD_SECONDS: Final = 10.0
"""How long the answer to what ranks have left for each other may take: the one that holds it may be busy in C++."""

LEAVING_SECONDS: Final = 5.0
"""How long the rank that holds the meeting waits at its end for the others to leave."""

CALL_SECONDS: Final = 1.0
"""How long one call at a door may take."""

WELCOME_SECONDS: Final = 5.0
"""How long the answer to a call may take: rank 0 may be busy in C++."""

VERDICT_SECONDS: Final = 30.0
"""How much longer than the ranks are waited for the word may take that all are there, or who is not."""

POLL_SECONDS: Final = 0.05

PORTS: Final = range(20000, 32000)
"""Below those that systems give to outgoing connections."""

DOORS: Final = 8
"""Ports that are tried: others may be taken by another run or another program."""


@dataclass(frozen=True)
class Door:
    """Where the ranks of one run look for its rank 0: a host that all know, and ports made from what all know."""

    host: str
    ports: tuple[int, ...]
    run: str

    @classmethod
    def at(cls, host: str, port: str, number: int = 0) -> "Door":
        """Return the door to a run's meeting; no other run at this time has a scheduler with this address."""
        run = f"{host}:{port}"
        first = zlib.crc32(run.encode()) % (len(PORTS) - DOORS)
        return cls(host, tuple(PORTS[first + i] for i in range(DOORS)), f"{run}#{number}")


class Meeting:
    """The ranks of a run, all of which take part, watched or not; `board` is where they leave words."""

    name: Final = ""
    """Their exchanges are no process group's."""

    def __init__(self, line: Line, rank: int, size: int, hub: Hub | None) -> None:
        self.line = line
        self.rank = rank
        self.size = size
        self.board = Board(line, size)
        self._hub = hub
        self._exchanges = 0

    def exchange(self, mine: Any) -> list[Any]:
        """Return what every rank gives, in the order of ranks; it is plain data.

        Raises:
            MeetingBroken: when a rank does not take part.

        """
        number, self._exchanges = self._exchanges, self._exchanges + 1
        self.line.send({"gather": number, "given": mine})
        found: list[Any] = self.line.wait("gather", number, EXCHANGE_SECONDS)
        return found

    def close(self, *, broken: bool = False) -> None:
        """Leave; the rank that holds the meeting stays a moment for the others."""
        self.line.close()
        if self._hub is not None:
            self._hub.wait(0.0 if broken else LEAVING_SECONDS)


class Board:
    """Where ranks leave words for each other that are read without waiting for anyone's training."""

    def __init__(self, line: Line, size: int) -> None:
        self.size = size
        self._line = line
        self._reads = 0

    def put(self, key: str, text: str) -> None:
        """Leave a word."""
        self._line.send({"put": key, "text": text})

    def all(self, prefix: str) -> dict[int, str]:
        """Return what the ranks have left under `<prefix>/<rank>`."""
        number, self._reads = self._reads, self._reads + 1
        self._line.send({"read": number, "prefix": f"{prefix}/"})
        found = self._line.wait("read", number, BOARD_SECONDS)
        return {int(key.rpartition("/")[2]): text for key, text in found.items()}


class Agreement:
    """Finds the greatest of what the ranks propose, while their steps go on. Alone a rank agrees with itself."""

    def __init__(self, meeting: Meeting | None, max_wait: float) -> None:
        self._meeting = meeting
        self._max_wait = max_wait
        self._number = 0
        self._own: list[float] | None = None

    def propose(self, values: Sequence[float]) -> None:
        """Begin to agree on values, as many on every rank.

        Raises:
            MeetingBroken: when the other ranks cannot be reached.

        """
        self._own = [float(value) for value in values]
        self._number += 1
        if self._meeting is not None:
            self._meeting.line.send({"greatest": self._number, "given": self._own})

    def result(self) -> list[float] | None:
        """Return the greatest of each value, waiting for the other ranks; None when nothing was proposed.

        Raises:
            MeetingBroken: when a rank has not proposed anything within `max_wait` seconds, or has left.

        """
        own, self._own = self._own, None
        if own is None or self._meeting is None:
            return own
        agreed: list[float] = self._meeting.line.wait("greatest", self._number, self._max_wait)
        return agreed


def meet(door: Door, rank: int, size: int, seconds: float = MEETING_SECONDS) -> Meeting:
    """Wait until every rank has come.

    Raises:
        MeetingBroken: when one has not, on every rank that has.

    """
    hub = Hub(_open(door), door.run, size, seconds) if rank == 0 else None
    line = _call(door, {"run": door.run, "rank": rank, "size": size}, time.monotonic() + seconds)
    try:
        missing = line.wait("here", 0, seconds + VERDICT_SECONDS)
    except MeetingBroken:
        line.close()
        raise
    if missing:
        line.close()
        raise MeetingBroken(f"{ranks_named(missing)} did not call watch() within {seconds:.0f} s")
    return Meeting(line, rank, size, hub)


def _open(door: Door) -> socket.socket:
    """Return a socket that listens at the first port that is free.

    Raises:
        MeetingBroken: when none is, or when the host is another.

    """
    reason: OSError | None = None
    for port in door.ports:
        try:
            return socket.create_server((door.host, port), family=_family(door.host), backlog=128)
        except OSError as error:
            reason = error
    raise MeetingBroken(f"rank 0 cannot listen at {door.host}, ports {door.ports[0]} to {door.ports[-1]}: {reason}")


def _call(door: Door, hello: dict[str, Any], end: float) -> Line:
    """Return the connection to rank 0, which may not be there yet; behind a port there may be someone else.

    Raises:
        MeetingBroken: when it has not answered at the end.

    """
    while time.monotonic() < end:
        for port in door.ports:
            with contextlib.suppress(OSError, MeetingBroken):
                return _enter(kept_from_children(socket.create_connection((door.host, port), CALL_SECONDS)), hello)
        time.sleep(POLL_SECONDS)
    raise MeetingBroken(f"rank 0 was not found at {door.host}, ports {door.ports[0]} to {door.ports[-1]}")


def _enter(sock: socket.socket, hello: dict[str, Any]) -> Line:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line = Line(sock)
    try:
        line.send(hello)
        line.wait("welcome", hello["rank"], WELCOME_SECONDS)
        line.send({"ready": 1})
    except MeetingBroken:
        line.close()
        raise
    return line


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
