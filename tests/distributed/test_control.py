"""All ranks carry out a command, and decide on the budget, at the same step, also those that are not watched."""

import json

import overheads
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


def sampling_of(ranks, out, case):
    """Train on both ranks; return the lines of each one's sampling log, None for a rank without one."""
    ranks.run(overheads.run, out, case)
    paths = [out / f"rank{rank}" / "sampling.jsonl" for rank in range(2)]
    return [json_lines(path) if path.exists() else None for path in paths]


def test_the_slowest_rank_decides_for_all(two_ranks, tmp_path):
    sampling = sampling_of(two_ranks, tmp_path, "common")
    assert [(line["step"], line["every"]) for line in sampling[0]] == [
        (line["step"], line["every"]) for line in sampling[1]
    ]
    assert sampling[0][-1]["every"]["gradients"] == 32


@pytest.mark.parametrize("case", ["left_out", "failed"])
def test_a_rank_that_is_left_out_or_has_failed_is_not_waited_for(two_ranks, tmp_path, case):
    sampling = sampling_of(two_ranks, tmp_path, case)
    assert (sampling[0] is None) == (case == "left_out")
    assert sampling[1][-1]["every"]["gradients"] == 32
