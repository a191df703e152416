"""What an exchange of many ranks costs the one that holds a meeting over sockets: `python benchmarks/meeting.py`.

The other ranks are connections of a second process, which says what they would say.
"""

import json
import multiprocessing
import os
import socket
import sys
import time

from machine import describe_machine

from trainsentry.collectors.socket_meeting import Agreement, Door, meet

EXCHANGES = 50
WISHES = [0.0, 1.0, -5.0, 10.0, -10.0, *[0.1] * 7]
"""As many numbers as the monitor's ranks tell each other with an overhead budget."""


def call(door: Door) -> socket.socket:
    """Return a connection to rank 0, which may not listen yet."""
    while True:
        try:
            return socket.create_connection((door.host, door.ports[0]), 5)
        except OSError:
            time.sleep(0.05)


def play_others(door: Door, size: int) -> None:
    """Say what ranks 1 to `size` - 1 say, and read what they are told."""
    lines = [call(door) for _ in range(1, size)]
    unread = [b""] * len(lines)

    def tell(message: dict[str, object]) -> None:
        for rank, line in enumerate(lines, 1):
            line.sendall(json.dumps({**message, "rank": rank} if "run" in message else message).encode() + b"\n")

    def read_until(word: bytes) -> None:
        for i, line in enumerate(lines):
            while word not in unread[i]:
                unread[i] += line.recv(1 << 16)
            unread[i] = unread[i].partition(word)[2]

    tell({"run": door.run, "size": size})
    read_until(b'"welcome"')
    tell({"ready": 1})
    read_until(b'"here"')
    for number in range(1, EXCHANGES + 1):
        tell({"greatest": number, "given": WISHES})
        read_until(b'"greatest": %d' % number)


def measure(size: int) -> tuple[float, float]:
    """Return milliseconds of rank 0's process, and of the clock, for an exchange."""
    door = Door.at("127.0.0.1", str(os.getpid()))
    others = multiprocessing.get_context("spawn").Process(target=play_others, args=(door, size))
    others.start()
    meeting = meet(door, 0, size, 60)
    agreement = Agreement(meeting, 60)
    processor, clock = time.process_time(), time.perf_counter()
    for _ in range(EXCHANGES):
        agreement.propose(WISHES)
        agreement.result()
    spent = time.process_time() - processor, time.perf_counter() - clock
    others.join()
    meeting.close(broken=True)
    return spent[0] * 1e3 / EXCHANGES, spent[1] * 1e3 / EXCHANGES


def main() -> None:
    """Print the table."""
    print("| ranks | rank 0's process, ms an exchange | clock, ms |\n|---|---|---|")
    for size in (4, 64, 512):
        processor, clock = measure(size)
        print(f"| {size} | {processor:.2f} | {clock:.2f} |", flush=True)
    print(describe_machine(), file=sys.stderr)


if __name__ == "__main__":
    main()
