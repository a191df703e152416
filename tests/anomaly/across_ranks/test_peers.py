"""Ranks that do the same work are alike; the odd one is named."""

import random

import pytest

from trainsentry.anomaly.across_ranks.peers import PeerRule, RankReport
from trainsentry.anomaly.incidents.sentence import evidence


@pytest.mark.parametrize(
    ("numbers", "named"),
    [((7, 7, 7), []), ((7, 7, 9), [2]), ((9, 7, 7), [0]), ((7, 9, 8), [0, 1, 2]), ((7, None, 9), [0, 2])],
)
def test_a_rank_that_calls_something_else_for_once_is_named_where_all_were_alike_before(numbers, named):
    rule = PeerRule()

    def judged(step, numbers):
        return rule.judge(step, {r: RankReport(order=n) for r, n in enumerate(numbers)}, frozenset())

    assert judged(0, numbers) == []
    assert not [a for step in range(1, 20) for a in judged(step, (step, step, step))]
    assert [(a.rank, a.kind, a.step) for a in judged(20, numbers)] == [(r, "communication_mismatch", 20) for r in named]
    assert judged(21, numbers) == [], "what lasts is said once"


def test_ranks_with_work_of_their_own_are_left_alone():
    rule = PeerRule()
    for step in range(100):
        assert rule.judge(step, {r: RankReport(order=r + step % 15) for r in range(3)}, frozenset()) == []


def test_losses_of_small_batches_raise_no_alarm():
    rule, choice = PeerRule(), random.Random(0)
    for step in range(3000):
        reports = {rank: RankReport(loss=choice.lognormvariate(0, 0.8)) for rank in range(8)}
        assert rule.judge(step, reports, frozenset()) == []


def test_a_rank_with_harder_data_from_the_start_is_not_at_fault():
    rule = PeerRule()
    reports = {rank: RankReport(loss=loss) for rank, loss in enumerate((1.0, 1.1, 9.0))}
    assert not [a for step in range(200) for a in rule.judge(step, reports, frozenset())]


def test_a_rank_whose_loss_leaves_the_others_is_named_with_their_median():
    rule, found = PeerRule(), []
    for step in range(60):
        losses = (1.0, 1.1, 9.0 if step >= 30 else 1.0)
        found += rule.judge(step, {rank: RankReport(loss=loss) for rank, loss in enumerate(losses)}, frozenset())
    assert [evidence(a) for a in found] == [
        "loss of rank 2 is 9 at step 39, 8.18 times the median of the other ranks, 1.1"
    ]


def test_chance_matches_of_data_are_forgotten():
    rule, both = PeerRule(), frozenset({0, 1})
    for step in range(200):
        same = step % 20 == 0
        reports = {0: RankReport(data=float(step)), 1: RankReport(data=float(step) if same else -1.0 - step)}
        assert rule.judge(step, reports, both) == []
    assert rule.judge(0, {0: RankReport(data=5.0), 1: RankReport(data=5.0)}, frozenset()) == []


@pytest.mark.parametrize(("own", "found"), [(0.05, True), (0.009, False)])
def test_a_rank_that_begins_its_passes_late_is_the_slow_one(own, found):
    rule, told = PeerRule(), []
    for step in range(60):
        reports = {r: RankReport(seconds=0.07, outside=own if r == 1 and step >= 30 else 0.001) for r in range(2)}
        told += rule.judge(step, reports, frozenset())
    assert [(a.step, a.rank, a.kind) for a in told] == ([(45, 1, "straggler")] if found else [])
    assert all("before its first pass" in PeerRule.sentence(a, "") for a in told)


def test_the_stages_of_a_pipeline_begin_one_after_the_other_and_none_is_late():
    rule = PeerRule()
    for step in range(120):
        reports = {r: RankReport(seconds=1.0, outside=0.25 * r) for r in range(4)}
        assert rule.judge(step, reports, frozenset()) == []


def test_a_stage_that_begins_nearly_as_late_as_counts_is_not_slow_where_it_is_later_for_a_while():
    """The last stage waits for what the first one computes."""
    rule, draw = PeerRule(), random.Random(0)
    for step in range(400):
        own = 0.095 if draw.random() < 0.4 or step < 4 else 0.12
        own = 0.12 if step > 300 else own
        reports = {r: RankReport(seconds=1.0, outside=own if r == 1 else 0.001) for r in range(2)}
        assert rule.judge(step, reports, frozenset()) == []


def test_a_rank_that_evaluates_at_each_fifth_step_is_told_once_it_is_late_at_all():
    rule, told = PeerRule(), []
    for step in range(300):
        late = step % 5 == 0 or step >= 200
        reports = {r: RankReport(seconds=1.0, outside=0.9 if r == 0 and late else 0.001) for r in range(2)}
        told += rule.judge(step, reports, frozenset())
    assert [(a.rank, 210 <= a.step < 220) for a in told] == [(0, True)]


def test_a_rank_that_evaluates_now_and_then_is_not_slow():
    rule = PeerRule()
    for step in range(200):
        late = step % 4 < 2
        reports = {r: RankReport(seconds=1.0, outside=0.9 if r == 0 and late else 0.001) for r in range(4)}
        assert rule.judge(step, reports, frozenset()) == []
