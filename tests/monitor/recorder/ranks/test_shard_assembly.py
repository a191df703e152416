"""Each shard is combined exactly once, also when ranks go back to an earlier step at different times."""

import socket
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from trainsentry.collectors.histogram import counts_of, without_empty_bins
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Layout, Series, SeriesTable
from trainsentry.collectors.statistics import COLUMNS, MEAN
from trainsentry.monitor.recorder.messages import FLUSHED
from trainsentry.monitor.recorder.ranks import network
from trainsentry.monitor.recorder.ranks.peer_messages import ALL
from trainsentry.monitor.recorder.ranks.rank_tree import RankTree
from trainsentry.monitor.recorder.ranks.shard_assembly import ShardAssembly
from trainsentry.monitor.recorder.ranks.tree_position import Address, TreePosition


def half(rank, step, value, name="w"):
    """One rank's half of a parameter, every element of it `value`."""
    table = SeriesTable()
    ids = [table.series_id(Series(name, "parameter"))]
    layout = table.layout_id(Layout((4,), "float32", 4, (8,), f"{4 * rank}:{4 * rank + 4}"))
    row = [value, value, value, 2 * abs(value), 0, 0, 0, np.nan]
    record = StepRecord(step, rank, np.asarray(ids, np.int32), np.asarray([layout], np.int32), np.asarray([row]))
    assert len(row) == COLUMNS
    return table, record


@pytest.fixture
def assembly():
    made = ShardAssembly(0, {0, 1}, final=True)
    for rank in range(2):
        made.use_table(rank, half(rank, 0, 0.0)[0])
    return made


def means(assembly):
    return [(record.step, float(record.values[0, MEAN])) for record in assembly.complete()]


def test_a_step_is_complete_when_every_rank_has_gone_on(assembly):
    assembly.take(0, half(0, 0, 1.0)[1])
    assembly.take(1, half(1, 0, 3.0)[1])
    assert means(assembly) == []
    assembly.take(0, half(0, 1, 1.0)[1])
    assembly.take(1, half(1, 1, 1.0)[1])
    assert means(assembly) == [(0, 2.0)]


def counted(record, values):
    counts = counts_of(np.asarray(values))
    return replace(record, histograms=without_empty_bins(counts[None]))


def test_the_histogram_of_a_whole_tensor_adds_those_of_its_parts(assembly):
    assembly.take(0, counted(half(0, 0, 1.0)[1], [1.0, 1.0, -2.0, 0.0]))
    assembly.take(1, counted(half(1, 0, 1.0)[1], [1.0, 8.0, 8.0, 8.0]))
    for rank in range(2):
        assembly.take(rank, half(rank, 1, 1.0)[1])  # without histograms
        assembly.finish(rank, ALL)
    first, second = assembly.complete()
    assert first.histograms.texts() == ["-181:1 0:1 177:3 189:3"]
    assert second.histograms is None


def test_what_is_not_the_whole_gives_no_row(assembly):
    assembly.take(0, half(0, 0, 1.0)[1])
    assembly.finish(0, ALL)
    assembly.finish(1, ALL)
    assert means(assembly) == []
    assert assembly.incomplete == 1


@pytest.mark.parametrize("root_first", [True, False])
def test_after_a_rollback_no_old_row_counts_and_no_new_one_is_lost(assembly, root_first):
    for step in range(6):
        assembly.take(0, half(0, step, 1.0)[1])
    for step in range(5):
        assembly.take(1, half(1, step, 1.0)[1])
    assert [s for s, _ in means(assembly)] == [0, 1, 2, 3]

    def root_goes_back():
        assembly.go_back(0, 2)
        assembly.take(0, half(0, 2, 10.0)[1])

    def other_goes_back():
        assembly.take(1, half(1, 5, 1.0)[1])  # it was a step behind
        assembly.go_back(1, 2)
        assembly.take(1, half(1, 2, 20.0)[1])

    for goes_back in [root_goes_back, other_goes_back] if root_first else [other_goes_back, root_goes_back]:
        goes_back()
        assert 2 not in [s for s, _ in means(assembly)]
    for step in range(3, 8):
        assembly.take(0, half(0, step, 10.0)[1])
        assembly.take(1, half(1, step, 20.0)[1])
    assert means(assembly) == [(step, 15.0) for step in range(2, 7)]


def test_a_recorder_that_cannot_reach_the_others_says_so_once_and_answers_for_itself(monkeypatch):
    monkeypatch.setattr(network, "PATIENCE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # closed again: nobody listens there
    position = TreePosition(1, (0, 1), (), Address(0, "here", "127.0.0.1", port, "word"), "word")
    owner = SimpleNamespace(table=SeriesTable(), told=[], answers=[])
    owner.failed = lambda part, error, step: owner.told.append((part, str(error)))
    owner.take_from_root = owner.answers.append
    owner.settle_all = lambda: None
    together = RankTree(position, owner, 1.0)
    together.ask_flush(7)
    for _ in range(50):
        together.pump()
        if owner.answers:
            break
        time.sleep(0.02)
    together.pump()
    [(part, said)] = owner.told
    assert part == "recorders of other ranks"
    assert "rank 1 cannot reach" in said
    assert owner.answers == [{"type": FLUSHED, "token": 7}]
    assert together.alone
