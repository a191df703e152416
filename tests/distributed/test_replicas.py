"""Replicas stay equal to the bit; where they differ, the rank and the parameter are named."""

import importlib.util
import json

import buffer_faults
import pytest
from replica_faults import FAULT_STEP, run
from sharded_training import STRATEGIES
from written_files import first_from_tables

deepspeed = importlib.util.find_spec("deepspeed") is not None
DENSE = {"collect": {"parameters": {"every": 1}}, "on_incident": {"dump": False}}
FOUR = ("Strategy", "Plain", "Hsdp", "Fsdp1Hybrid")  # no strategy, or one of two replicas of two shards
ENGINES = ("Zero1", "Zero2", "Zero3", "DeepSpeed")
ALL = [n for n in STRATEGIES if not n.startswith(FOUR) and (deepspeed or not n.startswith(ENGINES))]


@pytest.mark.parametrize("rank", range(4))
def test_a_flipped_mantissa_bit_names_rank_and_parameter(four_ranks, tmp_path, rank):
    known = four_ranks.run(run, "Ddp", tmp_path, rank=rank, config=DENSE)
    assert all(k == known[0] for k in known), "every rank knows the same incidents"
    first = known[0][0]
    assert (first["rank"], first["name"], first["quantity"]) == (rank, "inner.0.weight", "parameter")
    assert (first["kind"], first["step"], first["severity"]) == ("replica_mismatch", FAULT_STEP, "critical")
    assert f"differs bitwise on rank {rank} at step" in first["summary"]
    assert "; 3 other ranks agree with each other" in first["summary"]
    assert len(known[0]) == 1
    assert first_from_tables(tmp_path) == [(rank, "inner.0.weight", "replica_mismatch")]


def test_a_replica_group_of_a_sharded_model(four_ranks, tmp_path):
    first = four_ranks.run(run, "Hsdp", tmp_path, rank=3, config=DENSE)[0][0]
    assert (first["name"], first["kind"]) == ("inner.0.weight", "replica_mismatch")
    assert first["rank"] in {1, 3}  # the two that hold this shard
    assert "a tie" in first["summary"]


def test_a_replicated_layer_of_a_tensor_parallel_model(four_ranks, tmp_path):
    first = four_ranks.run(run, "TensorParallel", tmp_path, rank=2, parameter="norm.weight", config=DENSE)[0][0]
    assert (first["rank"], first["name"], first["kind"]) == (2, "norm.weight", "replica_mismatch")


def test_of_two_ranks_none_is_called_the_culprit(two_ranks, tmp_path):
    first = two_ranks.run(run, "Ddp", tmp_path, rank=1, config=DENSE)[0][0]
    assert first["kind"] == "replica_mismatch"
    assert "a tie: it is unknown which rank is right" in first["summary"]
    assert {s["rank"] for s in first["suspects"] if s["name"] == "inner.0.weight"} == {0, 1}


@pytest.mark.parametrize("family", ["routed", "convolution"])
def test_a_buffer_that_all_ranks_change_alike_is_a_replica_too(two_ranks, tmp_path, family):
    assert two_ranks.run(buffer_faults.run, family, tmp_path / "clean") == [[], []]
    [first, *_] = two_ranks.run(buffer_faults.run, family, tmp_path / "changed", rank=1)[0]
    assert (first["name"], first["quantity"], first["kind"]) == ("bias", "buffer", "replica_mismatch")
    assert first["step"] == buffer_faults.FAULT_STEP


@pytest.mark.parametrize("name", ALL)
def test_clean_runs_raise_no_alarm(two_ranks, tmp_path, name):
    everything = {"every": 1}
    collect = {"collect": dict.fromkeys(("gradients", "parameters", "optimizer_state", "updates"), everything)}
    assert two_ranks.run(run, name, tmp_path, config=collect) == [[], []]
    for path in tmp_path.glob("rank*/status.json"):
        status = json.loads(path.read_text())
        assert (status["anomalies"], status["failures"], status["gaps"]) == (0, {}, [])
    assert first_from_tables(tmp_path) == []
