"""Measures the cost of sealed messages between recorders and ranks: `python benchmarks/cost/sealed_messages.py`.

Ratios within one run: sealing and checking a step's record to a parent's work on that record; a handshake to a
connection on this host without one. Each time is the best of several.
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
    """A step's record of `series` rows, as bytes."""

    series: int

    def record(self) -> StepRecord:
        """Return the record."""
        ids = np.arange(self.series, dtype=np.int32)
        return StepRecord(1, 0, ids, ids * 0, np.random.default_rng(0).random((self.series, COLUMNS)))


def best(work: Callable[[], object], times: int) -> float:
    """Return the seconds of one call, the best of several measurements."""
    found = []
    for _ in range(TURNS):
        began = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - began) / times)
    return min(found)


def parent_work(series: int) -> Callable[[], object]:
    """Return a function that does a parent's work on a step of two ranks with `series` gradients each."""
    assembly, table = ShardAssembly(0, {0, 1}, final=True), SeriesTable()
    for i in range(series):
        table.series_id(Series(f"layer{i}.weight", "gradient"))
    table.layout_id(Layout((64, 64), "float32", 4096))
    for rank in (0, 1):
        assembly.use_table(rank, table)
    record, steps = Message(series).record(), itertools.count()

    def work() -> None:
        step = next(steps)
        for rank in (0, 1):
            assembly.take(rank, replace(record, step=step, rank=rank))
        list(assembly.complete())

    return work


def shake_hands() -> None:
    """Run both sides of a handshake."""
    caller, callee = Caller(b"s" * 32, "recorder of rank 0", 1), Callee(b"s" * 32, "recorder of rank 0")
    proof, _ = callee.admit(caller.answer(callee.challenge(caller.hello())))
    caller.confirm(proof)


def connect() -> None:
    """Open a connection on this host and close it."""
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
        taken = best(parent_work(series), max(2, times // 4)) / 2
        speed = len(data) / both * 2 / 1e6
        print(f"| {series:,} | {len(data):,} | {both * 1e3:.3f} | {speed:.0f} | {both / taken:.2f} |", flush=True)
    hands, plain = best(shake_hands, 500), best(connect, 200)
    print(
        f"\na handshake, both sides: {hands * 1e6:.0f} µs of processor, {hands / plain:.2f} of connecting on this host"
    )
    print(describe_machine(), file=sys.stderr)


if __name__ == "__main__":
    main()
