"""Estimates the cost of up to thousands of ranks: measures the parts that one machine can run, models the network.

Measured: the host time of a step's exchange in the training process (torch's fake process group of that size sends
nothing, so this is the time of the call, not of communication), the bytes of a rank's records, and the time a recorder
takes to assemble its children's records. Modelled: the network, from the latency and bandwidth below; the training
process does not wait for it, unless an exchange takes longer than a step.

    python benchmarks/limits/scale.py
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    COMMUNICATION_CALL,
    COMMUNICATION_INPUT,
    COMMUNICATION_OUTPUT,
    COMMUNICATION_SECONDS,
    STEP_SECONDS,
    Layout,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import COLUMNS, VALUE
from trainsentry.collectors.torch.distributed.rendezvous import GroupMaxReduce, GroupRendezvous
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.ranks.consensus import LAG, MANY_RANKS, Consensus, Proposal
from trainsentry.monitor.recorder.ranks.comparison import Comparison
from trainsentry.monitor.recorder.ranks.shard_assembly import ShardAssembly
from trainsentry.monitor.recorder.ranks.tree_position import FANOUT, Address, position_of
from trainsentry.monitor.schedule import Schedule

LATENCY = 50e-6
"""Seconds of a small message between hosts: TCP in one data centre."""

BANDWIDTH = 1.25e9
"""Bytes a second: 10 Gbit/s, the management network, not the accelerators'."""

RANKS_A_HOST = 8
SECONDS_A_STEP = 1.0
CALLS = 200
"""Sampled collectives of a step: those of FSDP on 60 layers."""

NUMBERS = 5
"""The numbers that ranks agree on, without an overhead budget."""


def host_time(ranks: int, steps: int = 400) -> float:
    """Return the median seconds of one step's exchange in the training process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    rendezvous = GroupRendezvous(dist.group.WORLD, 0, ranks, None)
    common = Consensus(
        rendezvous, GroupMaxReduce(rendezvous, 1.0), Schedule(MonitorConfig(), several_ranks=True), Guard(), costs=0
    )
    times = []
    for step in range(steps):
        began = time.perf_counter()
        common.at_boundary(step, Proposal())
        times.append(time.perf_counter() - began)
    dist.destroy_process_group()
    return float(np.median(times))


def record_of(table: SeriesTable, count: int, rank: int, ranks: int) -> StepRecord:
    """Return a record of shards of `count` parameters."""
    ids = [table.series_id(Series(f"layers.{i}.weight", "gradient")) for i in range(count)]
    layout = table.layout_id(Layout((1024,), "float32", 1024, (1024 * ranks,), f"{1024 * rank}:{1024 * rank + 1024}"))
    values = np.random.default_rng(rank).standard_normal((count, COLUMNS))
    values[:, 3] = np.abs(values[:, 3])
    values[:, 4:7] = 0.0
    return StepRecord(0, rank, np.asarray(ids, np.int32), np.full(count, layout, np.int32), values)


def combine_time(children: int, count: int, steps: int = 5) -> tuple[float, int]:
    """Return the seconds in which a recorder assembles one step of its children's records, and one record's bytes."""
    ranks = children + 1
    assembly = ShardAssembly(0, set(range(ranks)), final=True)
    records = []
    for rank in range(ranks):
        table = SeriesTable()
        records.append(record_of(table, count, rank, ranks))
        assembly.use_table(rank, table)
    times = []
    for step in range(steps):
        began = time.perf_counter()
        for rank, record in enumerate(records):
            assembly.take(rank, replace(record, step=step))
            assembly.finish(rank, step)
        found = list(assembly.complete())
        times.append(time.perf_counter() - began)
        if len(found) != 1 or len(found[0]) != count:
            raise AssertionError("a step is not whole")
    return float(np.median(times)), records[0].nbytes


def tree(ranks: int) -> tuple[int, int]:
    """Return the largest number of children of a recorder, and the hops of the longest path to the root."""
    hosts = -(-ranks // RANKS_A_HOST)
    heads = [Address(h * RANKS_A_HOST, f"host{h}", "", 0, "") for h in range(hosts)]
    positions = {head.rank: position_of(head.rank, heads) for head in heads} if hosts <= 1024 else {}
    hops = 0
    for position in positions.values():
        depth, at = 0, position
        while at.parent is not None:
            depth, at = depth + 1, positions[at.parent.rank]
        hops = max(hops, depth)
    most = max(len(p.children) for p in positions.values())
    return most + min(RANKS_A_HOST, ranks) - 1, hops + 1


def reports_of(ranks: range, world: int) -> Comparison:
    """Return the comparison of one step with some ranks' losses and times, and `CALLS` collectives of each."""
    comparison = Comparison()
    comparison.data_parallel = set(range(world))
    table, noise = SeriesTable(), np.random.default_rng(ranks.start)
    layouts = [table.layout_id(Layout(shape, "float32", 1024)) for shape in ((1024,), ())]
    numbers = np.full(COLUMNS, np.nan)
    both = np.array([-1.0, 1.0, 0.0, 32.0, 0.0, 0.0, 0.0, 1.0])[:COLUMNS]
    rows, ids, kinds = [], [], []
    for call in range(CALLS):
        for quantity in (COMMUNICATION_CALL, COMMUNICATION_INPUT, COMMUNICATION_OUTPUT):
            name = f"world.all_reduce.{call}"
            ids.append(table.series_id(Series(name, quantity, index=f"all_reduce|world|{name}")))
            row = numbers.copy()
            row[:6] = call, 0.01, 4096, world, 0, 1
            rows.append(row if quantity == COMMUNICATION_CALL else both)
            kinds.append(layouts[0])
    for name in ("loss", STEP_SECONDS, COMMUNICATION_SECONDS):
        ids.append(table.series_id(Series(name, name, scalar=True)))
        kinds.append(layouts[1])
    order = np.asarray(ids, np.int32), np.asarray(kinds, np.int32)
    for rank in ranks:
        scalars = np.full((3, COLUMNS), np.nan)
        scalars[:, VALUE] = noise.lognormal(size=3) * 0.1
        comparison.take(rank, table, StepRecord(0, rank, *order, np.concatenate([rows, scalars])))
    return comparison


def compare_time(ranks: int) -> tuple[float, int]:
    """Return the seconds in which the root compares all ranks at one step, and the bytes that it receives."""
    root = reports_of(range(min(ranks, RANKS_A_HOST)), ranks)
    rest = range(RANKS_A_HOST, ranks)
    messages = []
    for part in range(FANOUT):
        below = reports_of(rest[part::FANOUT], ranks) if rest else Comparison()
        list(below.judge(0, final=False))
        messages += [(RANKS_A_HOST + part, json.dumps(message)) for message in below.left(0, {})]
    began = time.perf_counter()
    for source, message in messages:
        root.take_parts(source, json.loads(message))
    if any(found for _, found in root.judge(0)):
        raise AssertionError("nothing is wrong")
    return time.perf_counter() - began, sum(len(message) for _, message in messages)


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    print(describe_machine())
    print(f"\nModelled with {LATENCY * 1e6:.0f} µs and {BANDWIDTH / 1e9:.2f} GB/s, {RANKS_A_HOST} ranks a host.\n")
    print(
        "| ranks | exchange: host (µs) | share of a 1 s step | bytes a rank | on the wire (ms, modelled) | waited for |"
    )
    print("|---|---|---|---|---|---|")
    for ranks in (8, 64, 512, 4096):
        host = host_time(ranks)
        wire = 2 * (ranks - 1) * (LATENCY + NUMBERS * 8 / ranks / BANDWIDTH)
        late = max(0.0, wire - SECONDS_A_STEP * (LAG if ranks >= MANY_RANKS else 1))
        print(
            f"| {ranks} | {host * 1e6:.0f} | {host / SECONDS_A_STEP:.4%} | {2 * NUMBERS * 8} | {wire * 1e3:.1f} | "
            f"{late * 1e3:.0f} ms |",
            flush=True,
        )
    print(
        "\n| ranks | series | children | hops | a rank sends (MB) | a parent takes (MB) | to combine (ms) | wire (ms) |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for ranks in (8, 64, 512, 4096):
        children, hops = tree(ranks)
        for count in (1_000, 10_000, 20_000):
            seconds, size = combine_time(children, count)
            wire = hops * (LATENCY + children * size / BANDWIDTH)
            print(
                f"| {ranks} | {count:,} | {children} | {hops} | {size / 2**20:.2f} | {children * size / 2**20:.1f} | "
                f"{seconds * 1e3:.0f} | {wire * 1e3:.1f} |",
                flush=True,
            )
    print("\n| ranks | the root hears (MB) | to compare them (ms) |")
    print("|---|---|---|")
    for ranks in (8, 64, 512, 4096):
        seconds, size = compare_time(ranks)
        print(f"| {ranks} | {size / 2**20:.2f} | {seconds * 1e3:.0f} |", flush=True)


if __name__ == "__main__":
    main()
