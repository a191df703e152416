"""Hugging Face's Trainer on two ranks is watched by its callback, and stops on both at the same step."""

import importlib.util
import json

import pandas as pd
import pytest
import trainer_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is missing")


def test_both_ranks_record_every_step_as_data_parallel(two_ranks, tmp_path):
    out = tmp_path / "monitor_output"
    assert two_ranks.run(trainer_ranks.train, out, tmp_path / "trainer", 4) == [(4, None)] * 2
    for rank in range(2):
        table = pd.read_csv(out / f"rank{rank}" / "gradient_0-999.csv")
        assert sorted(table.step.unique()) == [0, 1, 2, 3]
        assert not table.name.str.startswith("module.").any()
    whole = pd.read_csv(out / "global" / "gradient_0-999.csv")
    assert len(whole) == len(table), "replicas count once"


def test_a_stop_for_one_rank_ends_both_trainers_at_the_same_step(two_ranks, tmp_path):
    out = tmp_path / "monitor_output"
    (first, reason), (second, same) = two_ranks.run(trainer_ranks.train, out, tmp_path / "trainer", 40, broken_at=3)
    assert first == second < 40
    assert same.endswith(reason)
    assert "rank 1" in reason
    assert json.loads((out / "rank1" / "status.json").read_text())["state"] == "closed"
