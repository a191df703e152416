"""Under Megatron-core's distributed optimizer each rank's shards are recorded, and whole tensors come out exactly."""

import importlib.util

import megatron_training
import pandas as pd
import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed")
NAMES = {
    "inner.0.weight", "inner.0.bias", "inner.2.weight", "inner.2.bias", "norm.weight", "norm.bias", "module.weight",
    "module.bias", "gain",
}  # fmt: skip


def test_shards_of_the_distributed_optimizer_add_up_to_the_whole_tensors(two_ranks, tmp_path):
    steps = two_ranks.run(megatron_training.sharded, tmp_path, "bfloat16")[0]
    for quantity in ("gradient", "parameter"):
        rows = pd.read_csv(tmp_path / "global" / f"{quantity}_0-999.csv").set_index(["step", "name"]).norm
        assert set(rows.index.get_level_values("name")) == NAMES
        for step, expected in enumerate(steps):
            assert rows.loc[step].to_dict() == pytest.approx(expected[quantity], rel=1e-5), (quantity, step)
    state = pd.read_csv(tmp_path / "global" / "exp_avg_0-999.csv")
    assert set(state.name) == NAMES


def test_a_step_that_its_loss_scaler_leaves_out_is_recorded_as_skipped(two_ranks, tmp_path):
    steps = two_ranks.run(megatron_training.sharded, tmp_path, "float16", loss_scale=2.0**8, overflow_at=1)[0]
    assert len(steps) == 2, "Megatron has left out the step of the overflow"
    scalars = pd.read_csv(tmp_path / "rank0" / "scalars_0-999.csv")
    assert list(scalars[scalars.name == "skipped"].step) == [1]
    rows = pd.read_csv(tmp_path / "global" / "gradient_0-999.csv").set_index(["step", "name"])
    assert rows.loc[0].norm.to_dict() == pytest.approx(steps[0]["gradient"], rel=1e-5), "unscaled"
    assert rows.loc[1].nans.sum() + rows.loc[1].infs.sum() > 0, "the gradients of the step that was left out"
    assert 1 not in pd.read_csv(tmp_path / "global" / "update_0-999.csv").step.tolist()
