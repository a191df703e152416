"""Collectives of two ranks: rows with what went in and came out, and what only both ranks together show."""

import numpy as np
import pandas as pd
from two_ranks import FAULT_STEP, STEPS, run_ranks

from trainsentry.monitor.history import diagnose


def fail(*problem):
    raise AssertionError(problem)


def test_collectives_of_two_ranks_are_recorded_and_compared_from_the_tables(tmp_path):
    run_ranks(tmp_path, "lost")
    inputs, outputs = (
        [pd.read_csv(tmp_path / f"rank{r}" / f"communication_{side}_0-999.csv") for r in range(2)]
        for side in ("input", "output")
    )
    for table in (*inputs, *outputs):
        calls = table[table.step == 0]
        assert calls.name.str.startswith("world.").all()
        assert sorted(calls.op.unique()) == ["all_gather", "all_reduce"]
        assert sorted(table.step.unique()) == list(range(STEPS))
    first = [t[(t.step == 0) & (t.name == "world.all_reduce.0")].iloc[0] for t in (*inputs, *outputs)]
    assert np.isclose(first[0]["mean"] + first[1]["mean"], first[2]["mean"])
    assert first[2]["mean"] == first[3]["mean"]
    assert (first[2]["sequence"], first[2]["bytes"]) == (0, 32)
    assert first[2]["seconds"] > 0
    found = diagnose([tmp_path / "rank0", tmp_path / "rank1"], fail)
    assert [(i.rank, i.kind, i.first_seen) for i in found][:1] == [(1, "communication_mismatch", FAULT_STEP)]
    assert found[0].name.startswith("world.all_reduce.")
