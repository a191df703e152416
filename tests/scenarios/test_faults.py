"""A fast part of the fault benchmark: planted faults are found, and the first suspect is the culprit."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "faults"))
import work

FOUND = [
    ("F01", "gpt"), ("F06", "cnn"), ("F08", "cnn"), ("F27", "gpt"), ("F30", "cnn"), ("F31", "cnn"), ("F33", "gpt"),
    ("F34", "cnn"), ("F39", "cnn"), ("X01", "cnn"), ("X03", "cnn"), ("X04", "cnn"), ("X07", "cnn"), ("X09", "cnn"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "family"), FOUND)
def test_a_planted_fault_is_found_and_its_culprit_named(case, family):
    who = {"case": case, "family": family, "optimizer": "adamw", "seed": 4, "collect": "everything"}
    outcome = work.run_here(who, faulty=True)
    assert (outcome["detected"], outcome["first_right"], outcome["early"]) == (True, True, 0), outcome["said"]
    assert outcome["kind_right"], outcome["said"]


@pytest.mark.parametrize(("case", "family"), [("B1", "gpt"), ("B3", "cnn"), ("B5", "cnn"), ("B6", "cnn")])
def test_where_nothing_is_wrong_nothing_is_said(case, family):
    who = {"case": case, "family": family, "optimizer": "adamw", "seed": 4, "collect": "everything"}
    outcome = work.run_here(who, faulty=True)
    assert outcome["early"] == 0, outcome["said"]
