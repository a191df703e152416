"""What the seals cost on what recorders and ranks say to each other: `python benchmarks/cost/sealed_messages.py`.

Ratios within one run: sealing and checking a step's record beside what a parent does with it once it is there; a
handshake beside a connection of this host without one. Best of several turns each.
"""

import itertools
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine

from trainsentry.collectors.ranks.handshake import Callee, Caller, Seals
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Layout, Series, SeriesTable
from trainsentry.collectors.statistics import COLUMNS
from trainsentry.monitor.recorder.ranks.shard_assembly import ShardAssembly

TURNS = 7


@dataclass(frozen=True)
class Message:
    """A step's record of so many series, as bytes."""

    series: int

    def record(self) -> StepRecord:
        """Return the record."""
        ids = np.arange(self.series, dtype=np.int32)
        return StepRecord(1, 0, ids, ids * 0, np.random.default_rng(0).random((self.series, COLUMNS)))


def best(work: Callable[[], object], times: int) -> float:
    """Return seconds of one call, in the best of several turns."""
    found = []
    for _ in range(TURNS):
        began = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - began) / times)
    return min(found)


def taking_in(series: int) -> Callable[[], object]:
    """Return what a parent does with a step of two ranks that hold as many gradients each."""
    gathering, table = ShardAssembly(0, {0, 1}, final=True), SeriesTable()
    for i in range(series):
        table.series_id(Series(f"layer{i}.weight", "gradient"))
    table.layout_id(Layout((64, 64), "float32", 4096))
    for rank in (0, 1):
        gathering.use_table(rank, table)
    record, steps = Message(series).record(), itertools.count()

    def work() -> None:
        step = next(steps)
        for rank in (0, 1):
            gathering.take(rank, replace(record, step=step, rank=rank))
        list(gathering.complete())

    return work


def shake_hands() -> None:
    """Do both sides of a handshake."""
    caller, callee = Caller(b"s" * 32, "recorder of rank 0", 1), Callee(b"s" * 32, "recorder of rank 0")
    proof, _ = callee.admit(caller.answer(callee.challenge(caller.hello())))
    caller.confirm(proof)


def connect() -> None:
    """Make a connection of this host and end it."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        server.accept()[0].close()
        one.close()


def main() -> None:
    """Print the table."""
    print("| series | bytes | seal and check, ms | MB/s, one way | of what the parent does with it |")
    print("|---|---|---|---|---|")
    for series in (100, 1_000, 10_000, 100_000):
        data = b"".join(Message(series).record().encode())
        one, other = Seals(b"up", b"down"), Seals(b"down", b"up")
        times = max(3, 2_000 // series)
        both = best(lambda o=one, t=other, d=data: t.check(o.seal(d), d), times)  # type: ignore[misc]
        taken = best(taking_in(series), max(2, times // 4)) / 2
        speed = len(data) / both * 2 / 1e6
        print(f"| {series:,} | {len(data):,} | {both * 1e3:.3f} | {speed:.0f} | {both / taken:.2f} |", flush=True)
    hands, plain = best(shake_hands, 500), best(connect, 200)
    print(
        f"\na handshake, both sides: {hands * 1e6:.0f} µs of processor, {hands / plain:.2f} of connecting on this host"
    )
    print(describe_machine(), file=sys.stderr)


if __name__ == "__main__":
    main()
