"""A rendezvous at a free port of this machine: its ranks, and others who call it."""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from trainsentry.collectors.ranks import run_secret
from trainsentry.collectors.ranks.connection import SealedLines, prove, text_of
from trainsentry.collectors.ranks.handshake import Caller
from trainsentry.collectors.ranks.rendezvous import Endpoint


def free_endpoint():
    """Return an endpoint at a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Endpoint.at("127.0.0.1", str(free.getsockname()[1]))


def on_ranks(size, work, absent=()):
    """Run `work(rank)` on each rank at once; return each result, or the error raised instead."""

    def guarded(rank):
        try:
            return work(rank)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, [rank for rank in range(size) if rank not in absent]))


def at_the_endpoint(endpoint):
    """Return a connection to rank 0, as soon as it is there."""
    end = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((endpoint.host, endpoint.ports[0]), 5)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)


def enter(endpoint, rank, size, secret=None):
    """Call rank 0 and prove oneself, with the run's secret or another; return the socket and its sealed lines."""
    sock = at_the_endpoint(endpoint)
    known = secret or run_secret.read_secret(endpoint.run)
    return sock, SealedLines(prove(sock, Caller(known, f"meeting {endpoint.run} of {size}", rank), 5), 2**20)


def say(sock, lines, **message):
    """Send one message over a sealed connection."""
    sock.sendall(lines.pack(text_of(message)))


def hung_up(sock):
    """Wait until the other side has hung up."""
    sock.settimeout(30)
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True
