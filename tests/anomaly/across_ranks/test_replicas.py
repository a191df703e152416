"""Replicas are equal to the bit; copies that never were equal are no replicas."""

import pytest

from trainsentry.anomaly.across_ranks.replicas import ReplicaRule, ReplicasOfStep
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.collectors.series import Series

WEIGHT = Series("w", "parameter")


def test_replicas_part_once_they_have_changed_together():
    rule = ReplicaRule()
    for step, value in enumerate([11, 12, 12]):
        assert rule.judge(step, [], {1: value}) == []
    found = rule.judge(3, [ReplicasOfStep(1, WEIGHT, {0: 5, 1: 5, 2: 6})], {})
    assert [(a.rank, a.last_clean, a.value, a.expected) for a in found] == [(2, 2, 1.0, 2.0)]
    assert evidence(found[0]) == (
        "parameter w differs bitwise on rank 2 at step 3; 2 other ranks agree with each other; all ranks were equal at "
        "step 2"
    )
    assert rule.judge(4, [ReplicasOfStep(1, WEIGHT, {0: 7, 1: 7, 2: 8})], {}) == [], "each once"


@pytest.mark.parametrize("equal", [[], [11], [11, 11, 11]])
def test_equal_seeds_and_what_never_changes_make_no_replicas(equal):
    rule = ReplicaRule()
    for step, value in enumerate(equal):
        rule.judge(step, [], {1: value})
    assert rule.judge(9, [ReplicasOfStep(1, WEIGHT, {0: 5, 1: 6})], {}) == []
    assert rule.stranger_names == {("w", 0)}


def test_buffers_that_ranks_share_by_chance_are_no_replicas_and_those_that_stay_equal_are():
    counts, bias, rule = Series("positives", "buffer"), Series("router.bias", "buffer"), ReplicaRule()
    for step in range(60):
        by_chance = step % 3 != 2  # equal twice, then not
        unequal = [] if by_chance else [ReplicasOfStep(2, counts, {0: step, 1: step + 1})]
        assert rule.judge(step, unequal, {1: step, **({2: step} if by_chance else {})}) == []
    assert len(rule.judge(60, [ReplicasOfStep(1, bias, {0: 5, 1: 5, 2: 6})], {})) == 1
