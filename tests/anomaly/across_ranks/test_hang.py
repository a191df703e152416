"""A hang names the missing rank and the call that the others wait in."""

import pytest

from trainsentry.anomaly.across_ranks.hang import HangRule
from trainsentry.anomaly.incidents.sentence import evidence

REPORT = {"step": 7, "rank": 0, "missing": [2], "seconds": 61.0, "call": None}


def test_a_hang_in_a_collective_names_the_missing_rank():
    found = HangRule.judge(REPORT | {"call": {"group": "world", "op": "all_reduce", "sequence": 4}})
    assert (found.rank, found.name, found.kind, found.last_clean) == (2, "world.all_reduce", "hang", 6)
    assert evidence(found).startswith(
        "rank 2 is missing in step 7: other ranks wait for it in call 4 of world.all_reduce; hang.json"
    )


def test_a_hang_of_the_training_itself_names_the_step_and_its_seconds():
    found = HangRule.judge(REPORT | {"missing": []})
    assert (found.rank, found.name) == (0, "step")
    assert evidence(found).startswith("step 7 has not ended after 61 s; hang.json")


def test_a_hang_in_a_call_that_was_not_watched_names_the_missing_rank():
    """As DDP's own, by default."""
    found = HangRule.judge(REPORT)
    assert (found.rank, found.name) == (2, "step")
    assert evidence(found).startswith("rank 2 is missing in step 7: other ranks have waited for it for 61 s; hang.json")


def test_what_is_no_report_raises():
    with pytest.raises(KeyError):
        HangRule.judge({})
