"""Collectives and point-to-point operations are recorded as they are, and nothing is left behind."""

import importlib.util

import communicating
import linear_identities
import pytest
import written_by_collectives
from sharded_training import train
from written_files import numel, table

OPS = {
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter",
    "reduce_scatter_tensor", "all_to_all_single", "send", "recv",
}  # fmt: skip


NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def test_every_kind_of_call_with_its_order_bytes_and_time(two_ranks, tmp_path):
    for bare, found, left, changed in two_ranks.run(communicating.watched, tmp_path):
        assert found == [bare, bare], "waits return what they returned before"
        assert left == 0
        assert changed == []
    for rank in range(2):
        sent, got = table(tmp_path, rank, "communication_input"), table(tmp_path, rank, "communication_output")
        assert {r["step"] for r in sent + got} == {"0"}
        assert {r["op"] for r in sent} >= OPS - {"recv"} - ({"scatter"} if rank else set())
        assert {r["op"] for r in got} >= OPS - {"send"} - ({"gather"} if rank else set())
        assert {r["group"] for r in sent} == {"world"}
        for row in sent + got:
            assert int(row["bytes"]) == 4 * numel(row)
            assert 0 <= float(row["seconds"]) < 60
        summed = [r for r in got if r["op"] == "all_reduce"]
        assert len(summed) == 3  # one of them asynchronous, one functional
        assert all(float(r["mean"]) == 3.0 for r in summed)
        assert {float(r["mean"]) for r in sent if r["op"] == "all_reduce"} == {rank + 1.0}
        gathered = [float(r["mean"]) for r in got if r["op"] == "all_gather"]
        assert gathered == [1.0, 2.0]
        order = [int(r["sequence"]) for r in sent if r["op"] not in {"send", "recv"}]
        assert order == sorted(order)
    numbers = [{(r["name"], r["sequence"]) for r in table(tmp_path, rank, "communication_input")} for rank in range(2)]
    common = {"world.all_reduce.0", "world.broadcast.0", "world.all_to_all_single.0"}
    assert {n for n in numbers[0] if n[0] in common} == {n for n in numbers[1] if n[0] in common}


def test_only_the_call_sites_that_are_asked_for(two_ranks, tmp_path):
    config = {"collect": {"communication": {"every": 1, "call_sites": ["*nowhere*"]}}}
    two_ranks.run(communicating.watched, tmp_path, config=config)
    assert table(tmp_path, 0, "communication_input") == []


def test_padding_that_nobody_reads_raises_no_alarm(two_ranks, tmp_path):
    assert two_ranks.run(communicating.padded, tmp_path) == [[], []]
    assert {r["nans"] for r in table(tmp_path, 0, "communication_input")} == {"1"}


@pytest.mark.parametrize(("name", "expected"), [
    ("Fsdp2", {"all_gather_into_tensor", "reduce_scatter_tensor"}),
    ("Fsdp1", {"all_gather", "reduce_scatter_tensor"}),
    ("TensorParallel", {"all_reduce"}),
    pytest.param("Zero2", {"all_reduce", "all_gather_into_tensor"}, marks=NEEDS_DEEPSPEED),
])  # fmt: skip
def test_what_frameworks_issue_by_themselves(two_ranks, tmp_path, name, expected):
    two_ranks.run(train, name, tmp_path, steps=2, gather=False, config={"collect": {"communication": {"every": 1}}})
    for rank in range(2):
        assert {r["op"] for r in table(tmp_path, rank, "communication_output")} >= expected


@pytest.mark.parametrize("communication", [False, True], ids=["", "collectives recorded"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("way", ["detached", "forward", "backward"])
def test_an_activation_is_recorded_as_the_module_made_it(two_ranks, tmp_path, way, on_device, communication):
    for seen, found in two_ranks.run(written_by_collectives.recorded, tmp_path, way, on_device, communication):
        assert set(seen) == {"a.output.0", "b.input.0"}
        assert found == pytest.approx(seen, rel=1e-6)


def test_a_dump_has_the_gradient_that_arrived(two_ranks, tmp_path):
    for found, true in two_ranks.run(written_by_collectives.dumped, tmp_path):
        assert found == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
@pytest.mark.parametrize("name", [
    "Ddp", "Fsdp2", "Fsdp2Mixed", "Fsdp1", "Fsdp1Original", "ZeroRedundancy",
    *(pytest.param(stage, marks=NEEDS_DEEPSPEED) for stage in ("Zero1", "Zero2", "Zero3")),
])  # fmt: skip
def test_gradients_that_are_summed_where_they_were_averaged(two_ranks, tmp_path, name, broken):
    told = [("all", "communication_mismatch", linear_identities.FAULT)] if broken else []
    first, _ = two_ranks.run(linear_identities.incidents_of, name, tmp_path, broken=broken)
    assert first == told  # rank 1 hears of it a moment later


@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
@pytest.mark.parametrize("name", ["Hsdp", "Fsdp1Hybrid"])
def test_gradients_that_are_summed_where_replicas_keep_parts(four_ranks, tmp_path, name, broken):
    told = [("all", "communication_mismatch", linear_identities.FAULT)] if broken else []
    first, *_ = four_ranks.run(linear_identities.incidents_of, name, tmp_path, broken=broken)
    assert first == told


@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_a_rank_that_gets_another_sum_under_tensor_parallelism_is_named(two_ranks, tmp_path, broken):
    told = [("world.all_reduce.0", "communication_mismatch", linear_identities.FAULT, 1)] if broken else []
    first, _ = two_ranks.run(linear_identities.incidents_of_lost_sums, tmp_path, broken=broken)
    assert first == told
