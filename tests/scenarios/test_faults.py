"""A fast part of the fault benchmark: planted faults are found, and the first suspect is the culprit."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "faults"))
import other_rules
import outcome
import work

FOUND = [
    ("F01", "gpt"), ("F06", "cnn"), ("F08", "cnn"), ("F27", "gpt"), ("F30", "cnn"), ("F31", "cnn"), ("F33", "gpt"),
    ("F34", "cnn"), ("F39", "cnn"), ("X01", "cnn"), ("X03", "cnn"), ("X04", "cnn"), ("X07", "cnn"), ("X09", "cnn"),
]  # fmt: skip


@pytest.fixture
def alone(monkeypatch):
    """The live verdict alone: the benchmark also judges by the rules of other tools, and twice from a run's files."""
    monkeypatch.setattr(other_rules, "verdicts", lambda *_, **__: {})
    monkeypatch.setattr(outcome, "first_from_tables", lambda *_, **__: [])


def run(case, family):
    who = {"case": case, "family": family, "optimizer": "adamw", "seed": 4, "collect": "everything"}
    return work.run_here(who, faulty=True)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("case", "family"), FOUND)
def test_a_planted_fault_is_found_and_its_culprit_named(case, family):
    found = run(case, family)
    assert (found["detected"], found["first_right"], found["early"]) == (True, True, 0), found["said"]
    assert found["kind_right"], found["said"]


def test_a_run_is_judged_by_the_rules_of_other_tools_too_and_its_files_say_the_same_anew():
    found = run("F06", "cnn")
    assert set(found["others"]) == set(other_rules.RULES)
    assert found["same_anew"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("case", "family"), [("B1", "gpt"), ("B3", "cnn"), ("B5", "cnn"), ("B6", "cnn")])
def test_where_nothing_is_wrong_nothing_is_said(case, family):
    found = run(case, family)
    assert found["early"] == 0, found["said"]
