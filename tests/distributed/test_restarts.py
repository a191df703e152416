"""Runs stop and go on, with another number of ranks too, and compare what they load; pipelines keep their names."""

import json

import pytest
import restarting
import torch
import torch.distributed.checkpoint as dcp
from strategy import batches, make_net
from whole_tensors import rows

import trainsentry
from trainsentry.exporters.csv.reader import read_table, table_files


def steps_in(directory):
    """Steps that a reader sees, one for each row of one parameter."""
    parts = read_table(table_files(directory)["parameter"], lambda *problem: pytest.fail(str(problem)))
    return [row.step for part in parts for row in part if row.name == "weight"]


def test_a_run_goes_on_from_a_distributed_checkpoint_and_every_step_is_there_once(two_ranks, tmp_path):
    found = two_ranks.run(restarting.checkpointed, tmp_path / "out", tmp_path / "checkpoint")
    assert found == [(6, [])] * 2
    for directory in ("global", "rank0", "rank1"):
        assert steps_in(tmp_path / "out" / directory) == list(range(10)), directory


def test_what_one_rank_has_learned_stays_with_its_number_in_a_distributed_checkpoint(two_ranks, tmp_path):
    found = two_ranks.run(restarting.learned_by, tmp_path / "out", tmp_path / "checkpoint")
    [rank] = {rank for rank, _ in found}
    assert [is_own for _, is_own in found] == [r == rank for r in range(2)]


def test_a_restart_with_more_ranks_continues_the_files(two_ranks, four_ranks, tmp_path):
    two_ranks.run(restarting.run_once, tmp_path, 0, 6)
    four_ranks.run(restarting.run_once, tmp_path, 4, 6)
    assert steps_in(tmp_path / "global") == list(range(10))
    assert steps_in(tmp_path / "rank0") == list(range(10))
    assert steps_in(tmp_path / "rank3") == list(range(4, 10))
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [s["start_step"] for s in starts] == [0, 4]


def test_stages_of_a_pipeline_are_parts_of_one_model(two_ranks, tmp_path):
    assert two_ranks.run(restarting.pipeline, tmp_path) == [[], []]
    names = {f"layers.{i}.{leaf}" for i in range(4) for leaf in ("weight", "bias")}
    assert {name for _, name in rows(tmp_path / "global", "parameter")} == names
    micro_steps = set()
    for path in (tmp_path / "rank1").glob("activation_output_*.csv"):
        micro_steps |= {line.split(",")[3] for line in path.read_text().splitlines() if ",5,0" not in line}
    assert {"0", "1", "2", "3"} <= micro_steps


def test_the_pass_by_which_a_pipeline_learns_its_shapes_is_not_recorded(two_ranks, tmp_path):
    assert two_ranks.run(restarting.pipeline_over_old_memory, tmp_path) == [[], []]
    for path in (tmp_path / "rank1").glob("activation_output_*.csv"):
        assert {line.split(",")[3] for line in path.read_text().splitlines()[1:]} == {"0", "1", "2", "3"}


def test_different_layers_of_one_name_are_not_taken_for_replicas(two_ranks, tmp_path):
    assert two_ranks.run(restarting.pipeline, tmp_path, own_numbers=True) == [[], []]
    assert rows(tmp_path / "global", "parameter") == {}
    assert {name for _, name in rows(tmp_path / "rank1", "parameter")} == {
        f"layers.{i}.{leaf}" for i in range(2) for leaf in ("weight", "bias")
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
def test_ranks_that_load_their_own_state_say_nothing(two_ranks, tmp_path, kind):
    assert two_ranks.run(restarting.resumed, tmp_path, kind) == [[], []]


def test_running_statistics_of_one_replica_for_all_are_what_was_saved(two_ranks, tmp_path):
    assert two_ranks.run(restarting.resumed, tmp_path, "ddp", of_first=True) == [[], []]


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
def test_a_changed_bit_in_a_shard_is_said_of_its_rank(two_ranks, tmp_path, kind):
    found = two_ranks.run(restarting.resumed, tmp_path, kind, "flip")
    assert found[0] == ["parameter inner.0.weight is not what was saved at step 4 (resumed at step 4)"]
    assert '"rank": 1, "name": "inner.0.weight"' in (tmp_path / "incidents.jsonl").read_text()


def test_a_shard_of_another_rank_is_said_to_be_that(two_ranks, tmp_path):
    found = two_ranks.run(restarting.resumed, tmp_path, "tp", "shard")
    assert found[0] == ["parameter inner.0.weight is what rank 0 saved of it at step 4 (resumed at step 4)"]
    assert '"rank": 1, "name": "inner.0.weight"' in (tmp_path / "incidents.jsonl").read_text()


def test_moments_that_are_exchanged_are_said_once_for_all_ranks(two_ranks, tmp_path):
    found = two_ranks.run(restarting.resumed, tmp_path, "fsdp2", "moments")
    assert len(found[0]) == 2
    assert "optimizer state exp_avg of gain is what was saved of exp_avg_sq of gain" in found[0][0]


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
def test_a_distributed_checkpoint_is_compared_whole(two_ranks, tmp_path, kind):
    two_ranks.run(restarting.save_distributed, tmp_path / "out", tmp_path / "checkpoint", kind)
    resume = (restarting.resume_distributed, tmp_path / "out", tmp_path / "checkpoint", kind)
    assert two_ranks.run(*resume) == [[], []]
    found = two_ranks.run(*resume, "flip")
    assert found[0] == ["parameter inner.0.weight is not what was saved at step 4 (resumed at step 4)"]


def test_one_process_compares_what_two_have_saved(two_ranks, tmp_path):
    two_ranks.run(restarting.save_distributed, tmp_path / "out", tmp_path / "checkpoint", "fsdp2")
    assert _resumed_alone(tmp_path) == []
    found = _resumed_alone(tmp_path, broken="norm.weight")
    assert found == ["parameter norm.weight is not what was saved at step 4 (resumed at step 4)"]

    found = _resumed_alone(tmp_path, exchanged=("norm.weight", "norm.bias"))
    assert found == [
        "parameter norm.weight is what was saved of norm.bias at step 4 (resumed at step 4)",
        "parameter norm.bias is what was saved of norm.weight at step 4 (resumed at step 4)",
    ]


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
def test_four_ranks_compare_what_two_have_saved(two_ranks, four_ranks, tmp_path, kind):
    two_ranks.run(restarting.save_distributed, tmp_path / "out", tmp_path / "checkpoint", kind)
    resume = (restarting.resume_distributed, tmp_path / "out", tmp_path / "checkpoint", kind)
    assert four_ranks.run(*resume) == [[], [], [], []]
    found = four_ranks.run(*resume, "flip")
    assert found[0] == ["parameter inner.0.weight is not what was saved at step 4 (resumed at step 4)"]


def _resumed_alone(tmp_path, broken=None, exchanged=()):
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"output_dir": str(tmp_path / "alone"), "strict": True}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        dcp.load({"model": model.state_dict(), "monitor": monitor}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        if broken is not None:
            model.get_parameter(broken).detach()[0] += 1
        if exchanged:
            first, second = (model.get_parameter(name).detach() for name in exchanged)
            first[:], second[:] = second.clone(), first.clone()
        for (x,) in batches(2):
            model(x).square().mean().backward()
            optimizer.step()
        monitor.flush()
        return [suspect.evidence for incident in monitor.incidents for suspect in incident.suspects]


def test_a_state_that_one_rank_asks_for_alone_neither_hangs_nor_raises_an_alarm(two_ranks, tmp_path):
    (told, said), (other, quiet) = two_ranks.run(restarting.save_on_some, tmp_path, "fsdp2")
    assert (told, other) == ([], [])
    assert (said, quiet) == (["fingerprints"], [])
