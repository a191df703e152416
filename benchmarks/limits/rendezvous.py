"""Measures what an exchange of many ranks costs rank 0's rendezvous server: `python benchmarks/limits/rendezvous.py`.

A second process opens the connections of all other ranks, and sends their messages.
"""

import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine

from trainsentry.collectors.ranks.connection import SealedLines, prove, text_of
from trainsentry.collectors.ranks.handshake import Caller
from trainsentry.collectors.ranks.rendezvous import Endpoint, SocketMaxReduce, meet
from trainsentry.collectors.ranks.rendezvous_server import LONGEST_LINE
from trainsentry.collectors.ranks.run_secret import SECRET

EXCHANGES = 50
PROPOSAL = [0.0, 1.0, -5.0, 10.0, -10.0, *[0.1] * 7]
"""The numbers that each rank sends in an exchange with an overhead budget."""


def call(endpoint: Endpoint) -> socket.socket:
    """Connect to rank 0, again until it listens."""
    while True:
        try:
            return socket.create_connection((endpoint.host, endpoint.ports[0]), 5)
        except OSError:
            time.sleep(0.05)


def enter(endpoint: Endpoint, rank: int, size: int) -> tuple[socket.socket, SealedLines]:
    """Return a rank's connection after the handshake."""
    sock = call(endpoint)
    caller = Caller(os.environ[SECRET].encode(), f"meeting {endpoint.run} of {size}", rank)
    return sock, SealedLines(prove(sock, caller, 60), LONGEST_LINE)


def play_others(endpoint: Endpoint, size: int) -> None:
    """Send the messages of ranks 1 to `size` - 1, and read the answers."""
    lines = [enter(endpoint, rank, size) for rank in range(1, size)]
    unread = [b""] * len(lines)

    def tell(message: dict[str, object]) -> None:
        for sock, sealed in lines:
            sock.sendall(sealed.pack(text_of(message)))

    def read_until(word: bytes) -> None:
        for i, (sock, _) in enumerate(lines):
            sock.settimeout(60)
            while word not in unread[i]:
                unread[i] += sock.recv(1 << 16)
            unread[i] = unread[i].partition(word)[2]

    tell({"ready": 1})
    read_until(b'"here"')
    for number in range(1, EXCHANGES + 1):
        tell({"greatest": number, "given": PROPOSAL})
        read_until(b'"greatest": %d' % number)


def measure(size: int) -> tuple[float, float]:
    """Return the CPU milliseconds of rank 0's process, and the wall milliseconds, of an exchange."""
    endpoint = Endpoint.at("127.0.0.1", str(os.getpid()))
    others = multiprocessing.get_context("spawn").Process(target=play_others, args=(endpoint, size))
    others.start()
    rendezvous = meet(endpoint, 0, size, 60)
    max_reduce = SocketMaxReduce(rendezvous, 60)
    processor, clock = time.process_time(), time.perf_counter()
    for _ in range(EXCHANGES):
        max_reduce.propose(PROPOSAL)
        max_reduce.result()
    spent = time.process_time() - processor, time.perf_counter() - clock
    others.join()
    rendezvous.close(broken=True)
    return spent[0] * 1e3 / EXCHANGES, spent[1] * 1e3 / EXCHANGES


def main() -> None:
    """Print the table."""
    os.environ[SECRET] = os.urandom(16).hex()
    print("| ranks | rank 0's process, ms an exchange | clock, ms |\n|---|---|---|")
    for size in (4, 64, 512):
        processor, clock = measure(size)
        print(f"| {size} | {processor:.2f} | {clock:.2f} |", flush=True)
    print(describe_machine(), file=sys.stderr)


if __name__ == "__main__":
    main()
