"""All ranks carry out a command at the same step, also those that read no file and those that are not watched."""

import json

import pandas as pd
import pytest
from controlled import run
from written_files import json_lines


@pytest.mark.parametrize(("ranks", "budget"), [("all", None), ("all", 0.5), ([1], None)])
def test_every_rank_follows_at_the_same_step(two_ranks, tmp_path, ranks, budget):
    found = two_ranks.run(run, tmp_path, ranks=ranks, budget=budget)
    assert len({(step, done) for step, _, done in found}) == 1, found
    assert all("enough" in reason for _, reason, _ in found)
    watched = [0, 1] if ranks == "all" else ranks
    changed = {}
    for rank in watched:
        lines = json_lines(tmp_path / f"rank{rank}" / "sampling.jsonl")
        changed[rank] = [(line["step"], line["changed"]) for line in lines if "changed" in line]
    assert len({json.dumps(lines) for lines in changed.values()}) == 1
    [(begin, on), (end, off), (_, dumped), _] = changed[watched[0]]
    assert dumped == {"dump": "now"}
    assert (on, off) == ({"collect.gradients.every": 1}, {"collect.gradients.every": 100})
    assert end == begin + 4
    for rank in watched:
        tables = (tmp_path / f"rank{rank}").glob("gradient_[0-9]*.csv")
        steps = set(pd.concat(pd.read_csv(path) for path in tables)["step"])
        assert set(range(begin, end)) <= steps
        assert steps <= {0, *range(begin, end)}
    [dump] = (tmp_path / "dump").iterdir()
    assert sorted(p.name for p in dump.iterdir()) == [f"rank{rank}" for rank in watched]
