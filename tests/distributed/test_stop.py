"""A stop on one rank stops all, at the same step, and no rank hangs."""

import importlib.util

import pytest
from stopping_training import FAULT_STEP, STEPS, run

deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
PLACES = [
    *(("Ddp", rank) for rank in range(4)),
    *(("Fsdp2", rank) for rank in (0, 3)),
    *(pytest.param("Zero2", rank, marks=deepspeed) for rank in (1, 2)),
]
"""Strategies and the rank of the event: each rank, and under each strategy two of them."""


def assert_stopped_together(found, kind="TrainingStopped", latest=FAULT_STEP + 4):
    assert {f[0] for f in found} == {kind}, found
    assert len({(f[1], f[3]) for f in found}) == 1, found
    assert FAULT_STEP <= found[0][1] <= latest, found


@pytest.mark.parametrize(("name", "rank"), PLACES)
def test_a_request_on_one_rank(four_ranks, tmp_path, name, rank):
    found = four_ranks.run(run, name, tmp_path, fault="request", rank=rank)
    assert_stopped_together(found, latest=FAULT_STEP + 1)
    assert [f[2] for f in found] == ["enough" if r == rank else f"rank {rank}: enough" for r in range(4)]


@pytest.mark.parametrize(("name", "rank"), PLACES)
def test_the_overflow_limit(four_ranks, tmp_path, name, rank):
    config = {"overflow_check": {"overflow_nums": 2}, "on_incident": False}
    found = four_ranks.run(run, name, tmp_path, fault="nan", rank=rank, config=config)
    assert_stopped_together(found, "OverflowLimitReached")
    assert all("overflow in 2 steps" in f[2] for f in found)


@pytest.mark.parametrize(("name", "rank"), PLACES)
def test_an_incident_of_one_rank(four_ranks, tmp_path, name, rank):
    config = {"on_incident": {"stop": True, "dump": False}, "collect": {"activations": {"every": 1}}}
    found = four_ranks.run(run, name, tmp_path, fault="nan", rank=rank, config=config)
    assert_stopped_together(found, latest=FAULT_STEP + 8)
    assert len({f[2].removeprefix("rank 0: ") for f in found}) == 1


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_is_not_watched_stops_and_can_stop_the_others(four_ranks, tmp_path, rank):
    found = four_ranks.run(run, "Ddp", tmp_path, fault="request", rank=rank, config={"ranks": [1, 3]})
    assert_stopped_together(found, latest=FAULT_STEP + 1)
    assert sorted(p.name for p in tmp_path.glob("rank*")) == ["rank1", "rank3"]


@pytest.mark.parametrize("how", ["slow", "collector", "boundary"])
def test_a_monitor_that_is_slow_or_broken_on_one_rank(four_ranks, tmp_path, how):
    found = four_ranks.run(run, "Fsdp2", tmp_path, fault="request", rank=1, broken=(how, 2))
    assert_stopped_together(found, latest=FAULT_STEP + 1)


def test_as_many_ranks_they_agree_less_often_and_still_together(four_ranks, tmp_path):
    found = four_ranks.run(run, "Ddp", tmp_path, fault="request", rank=2, many=True)
    assert_stopped_together(found, latest=FAULT_STEP + 15)


def test_without_a_stop_every_rank_does_every_step(four_ranks, tmp_path):
    found = four_ranks.run(run, "Ddp", tmp_path, fault=None, rank=0)
    assert [(f[0], f[3]) for f in found] == [(None, STEPS)] * 4
