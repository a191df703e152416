"""Two ranks, each with a simulated NPU, over hccl: nothing changes, nothing is reported, and both stop together."""

import json

import on_npus
import pandas as pd
import pytest

STRATEGIES = ["Ddp", "Fsdp2"]


def norms(out, quantity):
    """Return the recorded norms of a step and name: of the whole tensors where ranks hold parts."""
    folder = out / "global" if (out / "global" / f"{quantity}_0-999.csv").exists() else out / "rank0"
    table = pd.read_csv(folder / f"{quantity}_0-999.csv")
    return table.set_index(["step", "name"])["norm"].to_dict()


@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_equal_to_the_bit_norms_are_true_and_no_incident_is_reported(two_npus, tmp_path, name):
    bare = two_npus.run(on_npus.train, name, tmp_path, watched=False)
    found = two_npus.run(on_npus.train, name, tmp_path)
    assert [losses for losses, *_ in found] == [losses for losses, *_ in bare]
    for place, quantity in enumerate(("parameter", "gradient")):
        recorded = norms(tmp_path, quantity)
        truth = {(step, n): both[place] for step, names in enumerate(found[0][1]) for n, both in names.items()}
        assert recorded == pytest.approx(truth, rel=1e-5)
    assert not (tmp_path / "incidents.jsonl").exists() or (tmp_path / "incidents.jsonl").read_text() == ""
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["accelerator"] == "npu"


def test_collectives_are_recorded(two_npus, tmp_path):
    two_npus.run(on_npus.train, "Fsdp2", tmp_path, steps=2)
    recorded = pd.read_csv(tmp_path / "rank1" / "communication_output_0-999.csv")
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= set(recorded.op)
    assert recorded["norm"].gt(0).any()


@pytest.mark.parametrize("train", [on_npus.train, on_npus.train_saturating], ids=["inf_nan", "saturation"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_overflow_nums_stops_both_ranks_at_the_same_step(two_npus, tmp_path, name, train):
    settings = {"overflow_check": {"overflow_nums": 1}, "on_incident": False}
    found = two_npus.run(train, name, tmp_path, steps=12, overflow_at=3, settings=settings)
    steps = {stopped for *_, stopped in found}
    assert len(steps) == 1
    assert 3 <= steps.pop() <= 6
