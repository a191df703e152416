"""DistributedDataParallel's collectives in C++ are recorded, compared between ranks, and left unchanged."""

import pytest
import reducing
import torch
from written_files import numel, table

WAYS = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}]


@pytest.mark.parametrize("ddp", WAYS, ids=lambda d: next(iter(d), "plain"))
def test_its_buckets_and_buffers_are_recorded_and_training_is_the_same_to_the_bit(two_ranks, tmp_path, ddp):
    bare = two_ranks.run(reducing.train, tmp_path, monitored=False, **ddp)
    found = two_ranks.run(reducing.train, tmp_path, **ddp)
    for (weights, *_), (watched, incidents, left, restored) in zip(bare, found, strict=True):
        assert all(torch.equal(weights[name], watched[name]) for name in weights)
        assert (incidents, left, restored) == ([], 0, True)
    numbers = []
    for rank in range(2):
        sent, got = table(tmp_path, rank, "communication_input"), table(tmp_path, rank, "communication_output")
        assert {r["op"] for r in sent} == {r["op"] for r in got} == {"all_reduce", "broadcast"}
        buckets = [r for r in got if r["op"] == "all_reduce" and r["step"] == "5" and "int" not in r["dtype"]]
        assert sum(numel(r) for r in buckets) == 40 * 60 + 60 * 2 + 60 + 60 * 40 + 40
        assert len(buckets) > 1
        assert all(0 <= float(r["seconds"]) < 60 and int(r["bytes"]) == 4 * numel(r) for r in buckets)
        numbers.append({(r["name"], r["sequence"], r["op"]) for r in sent})
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bucket_that_is_lost_on_one_rank_names_it(two_ranks, tmp_path, rank):
    for _, incidents, _, _ in two_ranks.run(reducing.train, tmp_path, lost_on=rank):
        (incident,) = incidents
        assert (incident["kind"], incident["rank"]) == ("communication_mismatch", rank)
        assert (incident["step"], incident["quantity"]) == (reducing.LOST_STEP, "communication_output")
        assert incident["name"].startswith("world.all_reduce.")


def test_the_rank_that_the_reducer_waits_for_is_named(two_ranks, tmp_path):
    for _, incidents, _, _ in two_ranks.run(reducing.train, tmp_path, slow=1, steps=60):
        assert [(i["kind"], i["rank"]) for i in incidents] == [("straggler", 1)]


def test_a_backward_pass_that_fails_leaves_no_call_open_for_ever(two_ranks, tmp_path):
    for _, _, left, restored in two_ranks.run(reducing.train, tmp_path, fail_at=3):
        assert left <= 3
        assert restored
