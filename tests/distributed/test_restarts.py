"""Runs stop and go on, also with another number of ranks, and pipelines keep the names of their layers."""

import json

import pytest
import restarting
from whole_tensors import rows

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
