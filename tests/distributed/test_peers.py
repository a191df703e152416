"""Comparing ranks shows lost payloads, equal data, a slow rank and an odd loss."""

import json

import parted_numbers
import pytest
from many_ranks import on_hosts
from peer_faults import FAULT_STEP, run
from written_files import first_from_tables, json_lines


@pytest.mark.parametrize(
    ("op", "rank", "hosts"),
    [
        ("allreduce", 0, 1),
        ("allreduce", 3, 2),
        ("allreduce", 2, 4),
        ("all_gather_single", 3, 1),
        ("all_gather_single", 1, 2),
        ("broadcast", 3, 1),
        ("broadcast", 2, 2),
    ],
)
def test_a_lost_payload_names_rank_and_call(four_ranks, tmp_path, op, rank, hosts):
    known = four_ranks.run(on_hosts, hosts, run, tmp_path, op, rank=rank)
    assert all(k == known[0] for k in known)
    first = known[0][0]
    public = {"allreduce": "all_reduce", "all_gather_single": "all_gather_into_tensor", "broadcast": "broadcast"}[op]
    assert (first["rank"], first["kind"], first["step"]) == (rank, "communication_mismatch", FAULT_STEP)
    assert first["name"].startswith(f"world.{public}.")
    assert "does not follow from the inputs of the ranks" in first["summary"]
    assert first_from_tables(tmp_path)[0] == (rank, first["name"], "communication_mismatch")


def test_ranks_that_train_on_the_same_data(two_ranks, tmp_path):
    first = two_ranks.run(run, tmp_path, "data", data_parallel=True)[0]
    assert [(i["rank"], i["kind"], i["quantity"]) for i in first] == [(1, "duplicate_data", "data")]
    assert "rank 1 trains on the same data as rank 0" in first[0]["summary"]
    assert first_from_tables(tmp_path) == [(1, "input.0", "duplicate_data")]


def test_hosts_that_train_on_the_same_data(four_ranks, tmp_path):
    """Each rank reads the part of the data with its number on the host."""
    first = four_ranks.run(on_hosts, 2, run, tmp_path, "data of hosts", data_parallel=True)[0]
    assert {(i["kind"], i["quantity"]) for i in first} == {("duplicate_data", "data")}
    assert {s["rank"] for i in first for s in i["suspects"]} == {2, 3}


def test_equal_data_is_no_fault_where_nothing_is_data_parallel(two_ranks, tmp_path):
    assert two_ranks.run(run, tmp_path, "data") == [[], []]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_rank_is_the_one_that_the_others_wait_for(two_ranks, tmp_path, rank):
    first = two_ranks.run(run, tmp_path, "slow", rank=rank)[0]
    assert [(i["rank"], i["kind"], i["severity"]) for i in first] == [(rank, "straggler", "warning")]
    assert first_from_tables(tmp_path) == [(rank, "training", "straggler")]


def test_a_loss_that_stays_apart_from_those_on_two_hosts(four_ranks, tmp_path):
    first = four_ranks.run(on_hosts, 2, run, tmp_path, "loss", rank=2)[0]
    assert {(i["rank"], i["name"]) for i in first} == {(2, "loss")}
    assert {(rank, name) for rank, name, _ in first_from_tables(tmp_path)} == {(2, "loss")}


@pytest.mark.parametrize(("data_parallel", "hosts"), [(False, 1), (True, 2)])
def test_a_clean_run_raises_no_alarm(four_ranks, tmp_path, data_parallel, hosts):
    assert four_ranks.run(on_hosts, hosts, run, tmp_path, None, data_parallel=data_parallel) == [[]] * 4
    for path in tmp_path.glob("rank*/status.json"):
        assert json.loads(path.read_text())["failures"] == {}
    assert first_from_tables(tmp_path) == []


def test_gradients_of_one_rank_that_stay_apart_from_the_others(four_ranks, tmp_path):
    four_ranks.run(run, tmp_path, "gradient", rank=2, data_parallel=True)
    lines = json_lines(tmp_path / "rank0" / "anomalies.jsonl")
    apart = [a for a in lines if a["detector"] == "peers"]
    assert {(a["rank"], a["name"], a["quantity"]) for a in apart} == {(2, "own gradients", "gradient_unreduced")}
    assert all(a["value"] > 5 * a["expected"] for a in apart)


@pytest.mark.parametrize(
    ("how", "fault", "name"), [("sharded", "own norms", "grad_norm"), ("split", "another batch", "loss")]
)
def test_a_number_that_all_ranks_have_in_common_parts(two_ranks, tmp_path, how, fault, name):
    """Clipped by the norm of its own shards; given another batch than its peer of tensor parallelism."""
    first = two_ranks.run(parted_numbers.run, tmp_path, how, fault)[0]
    assert [(i["name"], i["kind"], i["step"]) for i in first] == [(name, "replica_mismatch", parted_numbers.FAULT_STEP)]
    assert (
        f"up to step {parted_numbers.FAULT_STEP - 1} these ranks had the same number to the bit" in first[0]["summary"]
    )


@pytest.mark.parametrize("how", ["sharded", "split"])
def test_numbers_that_stay_in_common_raise_no_alarm(two_ranks, tmp_path, how):
    assert two_ranks.run(parted_numbers.run, tmp_path, how) == [[], []]
