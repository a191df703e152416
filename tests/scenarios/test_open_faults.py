"""The open list of the fault benchmark: each fault harms the run from its step on, and each is written down whole."""

import open_faults
import pytest
import work
from families import FAMILIES, PLACES, UNSEEN
from open_faults import harm
from selection import chosen_families

CASES = work.load_cases("open")
ALONE = [(c.id, f) for c in CASES.values() if c.ranks == 1 for f in chosen_families(c)[-2:]]
TOGETHER = [(c.id, chosen_families(c)[0]) for c in CASES.values() if c.ranks > 1]


@pytest.mark.parametrize(("case", "family"), ALONE)
def test_a_fault_changes_the_run_and_nothing_before_it(case, family):
    same_before, changed = harm(case, family)
    assert same_before
    assert changed


@pytest.mark.parametrize(("case", "family"), TOGETHER)
def test_a_fault_among_ranks_changes_the_run_and_nothing_before_it(case, family, request):
    ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[CASES[case].ranks])
    found = ranks.run(open_faults.harm, case, family)
    assert all(same_before for same_before, _ in found)
    assert any(changed for _, changed in found)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_fault_says_where_it_was_reported_and_what_a_right_alarm_names(case):
    assert len(case.source) > 20
    assert case.expect.suspects
    assert 0 < case.expect.within <= 30
    for family in case.families:
        for _, name in case.expect.suspects:
            assert name.format(**PLACES[family])


def test_the_open_list_is_wide():
    groups = {c.group for c in CASES.values()}
    assert len(CASES) >= 40
    assert len(groups) >= 13
    assert len(FAMILIES) == 7
    assert len(UNSEEN) == 3
    both = [c for c in CASES.values() if set(c.families) & set(UNSEEN) and set(c.families) - set(UNSEEN)]
    assert {c.group for c in CASES.values() if c not in both} <= {"expert_routing"}


def test_a_suspect_is_right_where_quantity_and_place_are():
    case = CASES["gradient_doubled"]
    right = {"rank": 0, "quantity": "gradient", "name": "blocks.1.mlp.fc1.weight"}
    assert case.expect.is_right(right, "gpt")
    assert not case.expect.is_right({**right, "name": "blocks.2.mlp.fc1.weight"}, "gpt")
    assert not case.expect.is_right({**right, "quantity": "parameter"}, "gpt")
