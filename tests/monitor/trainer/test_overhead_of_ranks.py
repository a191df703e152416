"""All ranks take the same decision on the budget, and no rank waits for one that has failed."""

import overheads
import pytest
from written_files import json_lines


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
