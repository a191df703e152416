"""State that was there with its weight at every sample still is."""

import pytest
from step_records import Records

from trainsentry.anomaly.rules.optimizer.lost_state import LostStateRule

SEEN = ("lost_state", "lost_state")
WEIGHT, MOMENTUM = ("fc.weight", "parameter"), ("fc.weight", "momentum_buffer")


@pytest.fixture
def records():
    return Records()


@pytest.fixture
def rule(records, alone):
    return alone(LostStateRule, records.table)


def test_state_that_is_gone_while_weights_are_there(records, rule, judged):
    both = {WEIGHT: 1.0, MOMENTUM: 1.0}
    assert judged(rule, records, range(10), both) == []
    [found] = judged(rule, records, [10, 11], lambda s: {WEIGHT: 1.0, SEEN: 1.0} if s == 10 else both)
    assert (found.kind, found.step) == ("state_reset", 10)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_of_several_optimizers_the_one_that_lost_its_state_is_meant_also_where_it_alone_is_read(
    lost, records, rule, judged
):
    parts = {n: {(f"{n}.weight", "parameter"): 1.0, (f"{n}.weight", "momentum_buffer"): 1.0} for n in "ab"}
    for step in range(0, 60, 10):
        assert rule(records.step(step, parts["a"])) == []
        assert rule(records.step(step, parts["b"])) == []
    without = {key: 1.0 for key in parts[lost] if key[1] == "parameter"} | {SEEN: 1.0}
    assert rule(records.step(53, without)) == []
    [found] = rule(records.step(60, parts["a"]))
    assert (records.table.series[found.series_id].name, found.step) == (f"{lost}.weight", 53)
    assert judged(rule, records, range(61, 70), parts["a"]) == [], "weights that are not sampled lack nothing"


def test_state_that_is_sampled_more_seldom_than_weights_is_not_missing(records, rule, judged):
    both = {WEIGHT: 1.0, MOMENTUM: 1.0}
    assert judged(rule, records, range(60), lambda s: {WEIGHT: 1.0} if s % 2 else both) == []


@pytest.mark.parametrize("weights_every", [2, 10])
@pytest.mark.parametrize("states_every", [30, 10**6])
def test_weights_lack_nothing_where_an_edit_of_the_configuration_has_changed_what_is_sampled(
    weights_every, states_every, records, rule, judged
):
    """An incident had all of twenty steps sampled before."""
    both = {WEIGHT: 1.0, MOMENTUM: 1.0}

    def sizes(step):
        if 104 <= step < 124 or step % (10 if step < 150 else states_every) == 0:
            return both
        return {WEIGHT: 1.0} if step > 150 and step % weights_every == 0 else {}

    assert judged(rule, records, range(300), sizes) == []
