"""What the open list runs on, and what its report adds up and keeps to itself."""

import argparse
import json

import open_faults
import open_report
import pytest
import selection
import work
from families import UNSEEN

CASES = work.load_cases("open")
assert open_faults.work is work  # it has put the benchmark's folder on the path


def wanted(*arguments):
    parser = argparse.ArgumentParser()
    selection.add_options(parser)
    return selection.wanted_runs(parser.parse_args(["--list", "open", *arguments]))


def outcome(case, family, *, collect="everything", **found):
    who = {"case": case, "family": family, "optimizer": "adamw", "seed": 0, "collect": collect}
    blank = {"detected": False, "delay": None, "first_right": False, "early": 0, "said": "said of it"}
    return {**who, **blank, **found}


FOUND = {"detected": True, "delay": 2, "first_right": True}
OLD = [outcome("stuck_loader", "gpt"), outcome("stuck_loader", "vit"), outcome("norm_skipped", "moe", **FOUND)]
NEW = [outcome("stuck_loader", "gpt", **FOUND), outcome("stuck_loader", "vit", **FOUND), outcome("norm_skipped", "moe")]


def test_each_fault_runs_on_two_seen_families_and_an_unseen_one_at_most():
    for case in CASES.values():
        hidden = [f in UNSEEN for f in selection.chosen_families(case)]
        assert (hidden.count(False), hidden.count(True)) <= (2, 1)
        assert hidden


@pytest.mark.parametrize("n", [1, 3])
def test_the_parts_of_the_list_are_the_list(n):
    parts = [selection.of_run(r) for k in range(n) for r in wanted("--configuration", "both", "--part", f"{k + 1}/{n}")]
    assert len(parts) == len(set(parts))
    assert len(parts) == sum(2 * len(selection.chosen_families(c)) for c in CASES.values())


def test_runs_are_chosen_by_case_group_family_and_configuration():
    runs = wanted("--cases", "masks,stuck_loader", "--families", "seen", "--configuration", "default")
    assert {CASES[r["case"]].group for r in runs} == {"masks", "data_pipeline"}
    assert {r["collect"] for r in runs} == {"default"}
    assert not {r["family"] for r in runs} & set(UNSEEN)


def test_seen_and_unseen_families_are_added_up_apart():
    sums = json.loads(json.dumps(open_report.summary([*NEW, outcome("stuck_loader", "resnet", error="broke")])))
    seen, unseen = sums["everything"]["seen"]["seen"], sums["everything"]["unseen"]["unseen"]
    assert (seen["runs"], seen["found"], seen["right"], seen["delay"], seen["failed"]) == (2, 1, 1, 2, 1)
    assert (unseen["runs"], unseen["found"]) == (1, 1)
    assert "gap: found -50.0 points" in "\n".join(open_report.tables(NEW))


def test_of_unseen_families_only_sums_are_told():
    told = "\n".join([*open_report.missed(OLD), *open_report.compared(NEW, OLD, selection.of_run)])
    assert "stuck_loader" in told
    assert "+ stuck_loader gpt adamw 0 everything" in told
    assert "- norm_skipped moe adamw 0 everything" in told
    assert "vit" not in told
    assert "detected: 2 won, 1 lost; of these unseen 1 and 0" in told
