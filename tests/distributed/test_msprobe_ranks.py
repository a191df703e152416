"""msprobe's monitor on two ranks: a directory each, gradients before and after reduction, calls by line of code."""

import json

import pandas as pd
from msprobe_ranks import line, run


def test_each_rank_writes_its_own_gradients_and_the_chosen_calls(two_ranks, tmp_path):
    chosen = rf"msprobe_ranks\.py\[{line('the line that is chosen')}\]"
    communication = {"enable": True, "cc_pre_hook": True, "cc_codeline": [chosen]}
    two_ranks.run(run, tmp_path, cc_distribution=communication)
    tables = {}
    for rank in range(2):
        [directory] = (tmp_path / "out").glob(f"*-rank{rank}-*")
        for table in ("grad_unreduced", "grad_reduced", "other"):
            tables[table, rank] = pd.read_csv(directory / f"{table}_1-1.csv")
    assert not tables["grad_unreduced", 0].equals(tables["grad_unreduced", 1])
    assert tables["grad_reduced", 0].equals(tables["grad_reduced", 1])
    rows = tables["other", 1][["name", "norm", "max"]].to_numpy().tolist()
    assert rows == [["all_reduce.pre", 2.0, 1.0], ["all_reduce.post", 4.0, 2.0]]
    status = json.loads((tmp_path / "out" / "rank0" / "status.json").read_text())
    assert status["gaps"] == []


def test_logging_the_calls_alone_ends_the_training_on_all_ranks(two_ranks, tmp_path):
    found = two_ranks.run(run, tmp_path, cc_distribution={"enable": True, "cc_log_only": True})
    assert all("the operations and their lines are in the log" in reason for reason in found)
