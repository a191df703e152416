"""Debuggers on all ranks dump collectives with their outputs, stop together, and leave sharded models unchanged."""

import importlib.util
import json

import debugged_ranks
import pytest
from typer.testing import CliRunner

from trainsentry.monitor.cli.app import app

deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
ENGINES = ("DeepSpeed", "Zero1", "Zero2", "Zero3")
MODULES = {"inner.0.Linear", "inner.1.GELU", "inner.2.Linear", "norm.LayerNorm", "module.Linear"}


def test_collectives_with_what_went_in_and_came_out(two_ranks, tmp_path):
    for rank, data in enumerate(two_ranks.run(debugged_ranks.collectives, tmp_path)):
        assert [n for n in data if n.startswith("Distributed.")] == [
            "Distributed.all_reduce.0.forward",
            "Distributed.all_gather_into_tensor.0.forward",
            "Distributed.all_reduce.1.forward",
        ]
        first = data["Distributed.all_reduce.0.forward"]
        assert (first["input_args"][0]["Max"], first["output"][0]["Max"]) == (1.0 + rank, 3.0)
        gathered = data["Distributed.all_gather_into_tensor.0.forward"]
        assert gathered["input_args"][0] is None
        assert (gathered["output"][0]["Min"], gathered["output"][0]["Max"]) == (0.0, 1.0)
        later = data["Distributed.all_reduce.1.forward"]
        assert (later["input_args"][0]["Max"], later["output"][0]["Max"]) == (1.0, 2.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_on_one_rank_stops_all_at_one_step_and_is_traced_to_it(two_ranks, tmp_path, rank):
    assert two_ranks.run(debugged_ranks.overflow_on, tmp_path, rank) == [2, 2]
    result = CliRunner().invoke(app, ["overflow", str(tmp_path / "dump" / "step2")])
    assert f"Tensor.__mul__.1.forward on rank {rank} made NaN or Inf" in result.stdout
    assert "verdict: normal overflow" in result.stdout
    assert f"Distributed.all_reduce.0.forward on rank {1 - rank}, from rank {rank}" in result.stdout


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_wrapped_model_trains_as_before_and_has_the_users_names(two_ranks, tmp_path, kind):
    for losses, names in two_ranks.run(debugged_ranks.sharded, tmp_path, kind):
        assert losses[True] == losses[False]
        assert {
            "Module.blocks.0.fc1.Linear.forward.0",
            "Module.blocks.0.fc1.Linear.backward.0",
            "Module.blocks.0.fc1.Linear.parameters_grad.0",
            "Functional.gelu.0.backward",
        } <= set(names)


@pytest.mark.parametrize("name", ["Fsdp1", *(pytest.param(n, marks=deepspeed) for n in ENGINES)])
def test_monitor_and_debugger_change_no_bit_and_record_forward_and_backward(two_ranks, tmp_path, name):
    bare = two_ranks.run(debugged_ranks.under_strategy, name, tmp_path / "bare", "bare")
    watched = two_ranks.run(debugged_ranks.under_strategy, name, tmp_path, "monitor and debugger")
    assert [weights for weights, _, _ in watched] == [weights for weights, _, _ in bare]
    assert [failures for _, _, failures in watched] == [{}, {}]
    for rank in range(2):
        data = json.loads((tmp_path / f"dump/step1/rank{rank}/dump.json").read_text())["data"]
        for module in MODULES:
            for direction in ("forward", "backward"):
                assert any(key.startswith("Module.") and f"{module}.{direction}" in key for key in data), (module, rank)
        assert list((tmp_path / "monitor" / f"rank{rank}").glob("gradient_*.csv"))


def test_each_rank_checks_its_own_calls_and_writes_its_own_tables(two_ranks, tmp_path):
    for rank, losses in enumerate(two_ranks.run(debugged_ranks.checked, tmp_path)):
        assert losses[True] == losses[False]
        [table] = (tmp_path / "dump" / "step0" / f"rank{rank}").glob("accuracy_checking_result_*.csv")
        rows = table.read_text(encoding="utf-8-sig").splitlines()[1:]
        assert rows == [f"Functional.layer_norm.{i},pass,pass," for i in range(2)]
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["step0"]
