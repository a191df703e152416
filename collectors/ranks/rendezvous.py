"""Ranks that meet over sockets of the monitor's own: for a framework whose exchanges all wait for the device."""

import contextlib
import logging
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainsentry.collectors.ranks.connection import Connection, RendezvousBroken, prove, ranks_named
from trainsentry.collectors.ranks.handshake import Caller, Refused, secret_for
from trainsentry.collectors.ranks.rendezvous_server import RendezvousServer, kept_from_children
from trainsentry.collectors.ranks.run_secret import (
    SECRET,
    UNAUTHENTICATED,
    given_secret,
    is_here,
    leave_secret,
    left_secret,
    may_be_unauthenticated,
    take_secret_away,
)

logger = logging.getLogger("trainsentry")

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
class Endpoint:
    """Where the ranks of one run look for its rank 0: a host that all know, and ports made from what all know."""

    host: str
    ports: tuple[int, ...]
    run: str

    @classmethod
    def at(cls, host: str, port: str, number: int = 0) -> "Endpoint":
        """Return the door to a run's meeting; no other run at this time has a scheduler with this address."""
        run = f"{host}:{port}"
        first = zlib.crc32(run.encode()) % (len(PORTS) - DOORS)
        return cls(host, tuple(PORTS[first + i] for i in range(DOORS)), f"{run}#{number}")


class SocketRendezvous:
    """The ranks of a run, all of which take part, watched or not; `store` is where they leave words.

    `secret` is known to all of them and to nobody else; it is never sent.
    """

    name: Final = ""
    """Their exchanges are no process group's."""

    def __init__(self, line: Connection, rank: int, size: int, hub: RendezvousServer | None, secret: str) -> None:
        self.line = line
        self.secret = secret
        self.rank = rank
        self.size = size
        self.store = SocketStore(line, size)
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


class SocketStore:
    """Where ranks leave words for each other that are read without waiting for anyone's training."""

    def __init__(self, line: Connection, size: int) -> None:
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


class SocketMaxReduce:
    """Finds the greatest of what the ranks propose, while their steps go on. Alone a rank agrees with itself."""

    def __init__(self, rendezvous: SocketRendezvous | None, max_wait: float) -> None:
        self._rendezvous = rendezvous
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
        if self._rendezvous is not None:
            self._rendezvous.line.send({"greatest": self._number, "given": self._own})

    def result(self) -> list[float] | None:
        """Return the greatest of each value, waiting for the other ranks; None when nothing was proposed.

        Raises:
            MeetingBroken: when a rank has not proposed anything within `max_wait` seconds, or has left.

        """
        own, self._own = self._own, None
        if own is None or self._rendezvous is None:
            return own
        agreed: list[float] = self._rendezvous.line.wait("greatest", self._number, self._max_wait)
        return agreed


def meet(endpoint: Endpoint, rank: int, size: int, seconds: float = MEETING_SECONDS) -> SocketRendezvous:
    """Wait until every rank has come; each proves to rank 0, and rank 0 to it, that it knows the run's secret.

    Raises:
        MeetingBroken: when one has not, on every rank that has, and where there is no secret to know.
        ValueError: when the environment's secret is too short.

    """
    given = _given(endpoint)
    purpose = f"meeting {endpoint.run} of {size}"
    try:
        hub = None
        if rank == 0:
            secret = given or _left(endpoint)  # before anybody can call
            hub = RendezvousServer(_open(endpoint), secret, purpose, size, seconds)
        line, secret = _call(endpoint, lambda: given or left_secret(endpoint.run), (purpose, rank), seconds)
        try:
            here = line.wait("here", 0, seconds + VERDICT_SECONDS)
        except RendezvousBroken:
            line.close()
            raise
    finally:
        if rank == 0 and given is None:
            take_secret_away(endpoint.run)
    if here["missing"]:
        line.close()
        hint = "" if given is not None else f"; ranks on other hosts need {SECRET}, the same on every rank"
        raise RendezvousBroken(f"{ranks_named(here['missing'])} did not call watch() within {seconds:.0f} s{hint}")
    return SocketRendezvous(line, rank, size, hub, secret_for(secret, "run", here["seed"]))


def _given(endpoint: Endpoint) -> bytes | None:
    """Return the secret that all ranks were given; None where rank 0 leaves one for those of this host.

    Raises:
        MeetingBroken: when rank 0 is on another host: whoever knows its address could say to be a rank.
        ValueError: when the environment's secret is too short.

    """
    given = given_secret()
    if given is None and may_be_unauthenticated():
        logger.warning(
            "trainsentry: the ranks meet without a secret, as %s asks for: who reaches %s can stop the training",
            UNAUTHENTICATED,
            endpoint.host,
        )
        return endpoint.run.encode()
    if given is None and not is_here(endpoint.host):
        raise RendezvousBroken(
            f"rank 0 is on another host ({endpoint.host}), and there is no secret by which ranks know each other: set "
            f"{SECRET} to the same random text on every rank (or {UNAUTHENTICATED}=1 where nobody else reaches them)"
        )
    return given


def _left(endpoint: Endpoint) -> bytes:
    try:
        return leave_secret(endpoint.run)
    except OSError as error:
        raise RendezvousBroken(
            f"the secret of the run cannot be left for its ranks ({error}); {SECRET} can hold it"
        ) from None


def _open(endpoint: Endpoint) -> socket.socket:
    """Return a socket that listens at the first port that is free.

    Raises:
        MeetingBroken: when none is, or when the host is another.

    """
    reason: OSError | None = None
    for port in endpoint.ports:
        try:
            return socket.create_server((endpoint.host, port), family=_family(endpoint.host), backlog=128)
        except OSError as error:
            reason = error
    raise RendezvousBroken(
        f"rank 0 cannot listen at {endpoint.host}, ports {endpoint.ports[0]} to {endpoint.ports[-1]}: {reason}"
    )


def _call(
    endpoint: Endpoint, find_secret: Callable[[], bytes | None], who: tuple[str, int], seconds: float
) -> tuple[Connection, bytes]:
    """Return the connection to rank 0, which may not be there yet, and the secret that both know.

    Behind a port there may be someone else, and a secret may be that of an earlier run, until there is a newer one.

    Raises:
        MeetingBroken: when rank 0 has not answered at the end, or when its secret cannot be trusted.

    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for port in endpoint.ports:
            try:
                secret = find_secret()
            except OSError as error:
                raise RendezvousBroken(str(error)) from None
            with contextlib.suppress(OSError, Refused, RendezvousBroken):
                if secret is not None:
                    sock = kept_from_children(socket.create_connection((endpoint.host, port), CALL_SECONDS))
                    return _enter(sock, Caller(secret, *who)), secret
        time.sleep(POLL_SECONDS)
    raise RendezvousBroken(
        f"rank 0 was not found at {endpoint.host}, ports {endpoint.ports[0]} to {endpoint.ports[-1]}"
    )


def _enter(sock: socket.socket, caller: Caller) -> Connection:
    try:
        seals = prove(sock, caller, WELCOME_SECONDS)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = Connection(sock, seals)
        line.send({"ready": 1})
    except (OSError, Refused, RendezvousBroken):
        sock.close()
        raise
    return line


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
