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
    assert judged(rule, records, range(10), {WEIGHT: 1.0, MOMENTUM: 1.0}) == []
    [found] = judged(rule, records, [10, 11], lambda s: {WEIGHT: 1.0} if s == 10 else {WEIGHT: 1.0, MOMENTUM: 1.0})
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


def test_weights_that_are_sampled_more_often_from_some_step_on_lack_nothing_until_their_state_is_due(
    records, rule, judged
):
    """The configuration was edited, or an incident had all of twenty steps sampled."""
    both = {WEIGHT: 1.0, MOMENTUM: 1.0}

    def sizes(step):
        dense = 104 <= step < 124
        return (
            both if dense or (step % 10 == 0 and step < 200) else {WEIGHT: 1.0} if step > 50 and step % 2 == 0 else {}
        )

    assert judged(rule, records, range(200), sizes) == []
    [found] = judged(rule, records, range(200, 230), sizes)
    assert found.step == 200
