"""Rendezvous of ranks over the monitor's own sockets, for a framework whose own exchanges all wait for the device."""

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
    is_this_host,
    may_be_unauthenticated,
    read_secret,
    remove_secret,
    write_secret,
)

logger = logging.getLogger("trainsentry")

RENDEZVOUS_SECONDS: Final = 60.0
"""How long the ranks wait for the last one to call `watch`: models are built and loaded at different speeds."""

EXCHANGE_SECONDS: Final = 180.0
"""How long an exchange may take; ranks that train together are at most a step apart when one begins."""

STORE_SECONDS: Final = 10.0
"""How long reading the store may take; rank 0, which holds it, may be busy in C++."""

LEAVING_SECONDS: Final = 5.0
"""How long rank 0 waits at its end for the other ranks to leave."""

CONNECT_SECONDS: Final = 1.0
"""How long connecting to a port may take."""

HANDSHAKE_SECONDS: Final = 5.0
"""How long a handshake may take; rank 0 may be busy in C++."""

OUTCOME_SECONDS: Final = 30.0
"""How much longer than for the last rank the others wait for rank 0 to say that all are there, or who is not."""

POLL_SECONDS: Final = 0.05
"""Pause between two rounds of attempts to connect."""

PORTS: Final = range(20000, 32000)
"""Ports of rendezvous servers: below those that systems give to outgoing connections."""

PORTS_TRIED: Final = 8
"""Ports of one run; another run or program may have taken some of them."""


@dataclass(frozen=True)
class Endpoint:
    """Where the ranks of one run look for its rank 0: a host and ports that each rank derives from the same facts."""

    host: str
    ports: tuple[int, ...]
    run: str

    @classmethod
    def at(cls, host: str, port: str, number: int = 0) -> "Endpoint":
        """Return the endpoint of a run's rendezvous `number`; the scheduler's address identifies the run."""
        run = f"{host}:{port}"
        first = zlib.crc32(run.encode()) % (len(PORTS) - PORTS_TRIED)
        return cls(host, tuple(PORTS[first + i] for i in range(PORTS_TRIED)), f"{run}#{number}")


class SocketRendezvous:
    """All ranks of a run, watched or not, as one of them sees them: exchanges values and holds the `store`.

    Only the ranks know `secret`; it is never sent.
    """

    name: Final = ""
    """Empty: the exchanges use no process group."""

    def __init__(
        self, connection: Connection, rank: int, size: int, server: RendezvousServer | None, secret: str
    ) -> None:
        self.connection = connection
        self.secret = secret
        self.rank = rank
        self.size = size
        self.store = SocketStore(connection, size)
        self._server = server
        self._exchanges = 0

    def exchange(self, mine: Any) -> list[Any]:
        """Gather one value from every rank; return them in rank order. Values must be JSON data.

        Raises:
            RendezvousBroken: when a rank does not take part.

        """
        number, self._exchanges = self._exchanges, self._exchanges + 1
        self.connection.send({"gather": number, "given": mine})
        found: list[Any] = self.connection.wait("gather", number, EXCHANGE_SECONDS)
        return found

    def close(self, *, broken: bool = False) -> None:
        """Leave; rank 0 first waits a moment for the others, unless the rendezvous is broken."""
        self.connection.close()
        if self._server is not None:
            self._server.wait(0.0 if broken else LEAVING_SECONDS)


class SocketStore:
    """Key-value store of the ranks; reading it waits for no rank's training."""

    def __init__(self, connection: Connection, size: int) -> None:
        self.size = size
        self._connection = connection
        self._reads = 0

    def put(self, key: str, text: str) -> None:
        """Store a text."""
        self._connection.send({"put": key, "text": text})

    def all(self, prefix: str) -> dict[int, str]:
        """Return the texts stored under `<prefix>/<rank>`, by rank."""
        number, self._reads = self._reads, self._reads + 1
        self._connection.send({"read": number, "prefix": f"{prefix}/"})
        found = self._connection.wait("read", number, STORE_SECONDS)
        return {int(key.rpartition("/")[2]): text for key, text in found.items()}


class SocketMaxReduce:
    """Computes the element-wise maximum over all ranks while their steps go on; without other ranks, the own values."""

    def __init__(self, rendezvous: SocketRendezvous | None, max_wait: float) -> None:
        self._rendezvous = rendezvous
        self._max_wait = max_wait
        self._number = 0
        self._own: list[float] | None = None

    def propose(self, values: Sequence[float]) -> None:
        """Start a max-reduce; every rank proposes equally many values.

        Raises:
            RendezvousBroken: when the other ranks cannot be reached.

        """
        self._own = [float(value) for value in values]
        self._number += 1
        if self._rendezvous is not None:
            self._rendezvous.connection.send({"greatest": self._number, "given": self._own})

    def result(self) -> list[float] | None:
        """Wait for the other ranks; return the element-wise maximum, or None when nothing was proposed.

        Raises:
            RendezvousBroken: when a rank has not proposed anything within `max_wait` seconds, or has left.

        """
        own, self._own = self._own, None
        if own is None or self._rendezvous is None:
            return own
        agreed: list[float] = self._rendezvous.connection.wait("greatest", self._number, self._max_wait)
        return agreed


def meet(endpoint: Endpoint, rank: int, size: int, seconds: float = RENDEZVOUS_SECONDS) -> SocketRendezvous:
    """Wait until every rank has joined; each rank and rank 0 prove to each other that they know the run secret.

    Raises:
        RendezvousBroken: on every rank that has joined, when another has not; also when there is no run secret.
        ValueError: when the environment's secret is too short.

    """
    given = _given(endpoint)
    purpose = f"meeting {endpoint.run} of {size}"
    try:
        server = None
        if rank == 0:
            secret = given or _write(endpoint)  # before any rank can call
            server = RendezvousServer(_open(endpoint), secret, purpose, size, seconds)
        connection, secret = _call(endpoint, lambda: given or read_secret(endpoint.run), (purpose, rank), seconds)
        try:
            here = connection.wait("here", 0, seconds + OUTCOME_SECONDS)
        except RendezvousBroken:
            connection.close()
            raise
    finally:
        if rank == 0 and given is None:
            remove_secret(endpoint.run)
    if here["missing"]:
        connection.close()
        hint = "" if given is not None else f"; ranks on other hosts need {SECRET}, the same on every rank"
        raise RendezvousBroken(f"{ranks_named(here['missing'])} did not call watch() within {seconds:.0f} s{hint}")
    return SocketRendezvous(connection, rank, size, server, secret_for(secret, "run", here["seed"]))


def _given(endpoint: Endpoint) -> bytes | None:
    """Return the secret that all ranks were given; None where rank 0 writes one for the ranks of this host.

    Raises:
        RendezvousBroken: when no secret is given and rank 0 is on another host: anyone could claim to be a rank.
        ValueError: when the environment's secret is too short.

    """
    given = given_secret()
    if given is None and may_be_unauthenticated():
        logger.warning(
            "trainsentry: the ranks meet without a secret, as %s asks: anyone who reaches %s can stop the training",
            UNAUTHENTICATED,
            endpoint.host,
        )
        return endpoint.run.encode()
    if given is None and not is_this_host(endpoint.host):
        raise RendezvousBroken(
            f"rank 0 is on another host ({endpoint.host}), and the ranks have no secret to authenticate each other: "
            f"set {SECRET} to the same random text on every rank (or {UNAUTHENTICATED}=1 where nobody else reaches "
            "them)"
        )
    return given


def _write(endpoint: Endpoint) -> bytes:
    try:
        return write_secret(endpoint.run)
    except OSError as error:
        raise RendezvousBroken(
            f"rank 0 cannot write the run secret for the other ranks ({error}); {SECRET} can hold it"
        ) from None


def _open(endpoint: Endpoint) -> socket.socket:
    """Return a socket that listens on the first free port.

    Raises:
        RendezvousBroken: when no port is free, or the address is another host's.

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
    """Call rank 0 until it answers; return the connection to it and the secret that both know.

    Another program may listen on a port, and the secret's file may be an earlier run's until rank 0 replaces it.

    Raises:
        RendezvousBroken: when rank 0 has not answered within `seconds`, or the secret's file cannot be trusted.

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
                    sock = kept_from_children(socket.create_connection((endpoint.host, port), CONNECT_SECONDS))
                    return _enter(sock, Caller(secret, *who)), secret
        time.sleep(POLL_SECONDS)
    raise RendezvousBroken(
        f"rank 0 was not found at {endpoint.host}, ports {endpoint.ports[0]} to {endpoint.ports[-1]}"
    )


def _enter(sock: socket.socket, caller: Caller) -> Connection:
    try:
        seals = prove(sock, caller, HANDSHAKE_SECONDS)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock, seals)
        connection.send({"ready": 1})
    except (OSError, Refused, RendezvousBroken):
        sock.close()
        raise
    return connection


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
