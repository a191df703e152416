"""Numbers that ranks have in common stay in common; a rank whose number parts is named."""

import random

import pytest

from trainsentry.anomaly.across_ranks.common_numbers import LEARNED, MOST_NAMES, CommonNumbersRule, CommonSeries
from trainsentry.anomaly.incidents.ranking import rank
from trainsentry.anomaly.incidents.sentence import evidence, summary
from trainsentry.collectors.series import Series

FINE = 1.23456789
"""Makes a number of many digits of one with few."""


def judged(rule, step, values, name="grad_norm", digits=FINE):
    for number, value in enumerate(values):
        if value is not None:
            rule.take(step, number, name, value * digits)
    return rule.judge(step)


def common(rule, steps, ranks):
    """All ranks have the same number, another one at each step."""
    choice = random.Random(0)
    assert [a for step in range(steps) for a in judged(rule, step, [choice.random()] * ranks)] == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((0.5, 0.5, 0.5, 0.5), []),
        ((0.5, 0.5, 0.7, 0.5), [2]),
        ((0.7, 0.5, 0.5, 0.5), [0]),
        ((0.7, 0.7, 0.5, 0.5), [2]),
        ((0.5, 0.6, 0.7, 0.8), [1]),
        ((0.5, None, 0.7, 0.5), [2]),
        ((0.5, 0.5, 0.50001, 0.5), []),
        ((0.5, 0.5, float("nan"), 0.5), []),
    ],
)
def test_a_rank_whose_number_parts_from_those_it_was_always_equal_to_is_named_once(values, named):
    rule = CommonNumbersRule()
    common(rule, 40, 4)
    found = judged(rule, 40, values)
    assert [(a.rank, a.kind, a.last_clean) for a in found] == [(r, "replica_mismatch", 39) for r in named]
    assert [judged(rule, step, values) for step in range(41, 80)] == [[]] * 39


def test_the_sentence_has_both_numbers_and_the_last_common_step():
    rule = CommonNumbersRule()
    common(rule, 30, 3)
    [found] = judged(rule, 30, (0.5, 0.125, 0.5))
    assert evidence(found) == (
        "grad_norm is 0.154321 on rank 1 and 0.617284 on the other ranks at step 30; up to step 29 these ranks had the "
        "same number to the bit"
    )


def test_of_two_ranks_none_is_blamed():
    rule = CommonNumbersRule()
    common(rule, 30, 2)
    [found] = judged(rule, 30, (0.5, 0.125))
    assert "on another at step 30, a tie: it is unknown which rank is right" in evidence(found)
    assert summary(rank([found], 10)).startswith("Since step 30: grad_norm is 0.154321 on rank 1")


def test_peers_of_tensor_parallelism_have_a_loss_in_common_and_other_ranks_their_own():
    rule, choice = CommonNumbersRule(), random.Random(0)
    for step in range(60):
        one, other = choice.random(), choice.random()
        assert judged(rule, step, (one, one, other, other)) == []
    assert [a.rank for a in judged(rule, 60, (0.5, 0.5, 0.7, 0.9))] == [3]


def test_losses_of_each_rank_and_numbers_of_few_values_are_in_common_by_chance_only():
    rule, choice = CommonNumbersRule(), random.Random(0)
    for step in range(3000):
        assert judged(rule, step, [choice.random() for _ in range(4)], "loss") == []
        assert judged(rule, step, [choice.choice((0.25, 0.5, 0.75)) for _ in range(2)], "accuracy", 1.0) == []


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (lambda step: 32.0 * step, 3200.5),
        (lambda step: 32 * step / 1000, 3.19),
        (lambda step: round(step / 7, 1), 14.2),
        (lambda step: 0.0012345678, 0.5123456789),
    ],
    ids=["samples", "thousands of samples", "minutes", "constant"],
)
def test_counts_rounded_numbers_and_those_that_never_change_may_part(value, other):
    """Samples seen are equal until a batch is shorter; nobody knows of a constant whether ranks compute it alike."""
    rule = CommonNumbersRule()
    for step in range(100):
        assert judged(rule, step, [value(step)] * 2, digits=1.0) == []
    assert judged(rule, 100, [value(100), other], digits=1.0) == []


def test_after_a_rollback_the_last_common_step_is_one_before():
    rule = CommonNumbersRule()
    common(rule, 40, 3)
    rule.go_back(30, 0)
    [found] = judged(rule, 30, (0.5, 0.7, 0.5))
    assert (found.rank, found.last_clean) == (1, 29)


def test_the_loss_and_the_rate_are_compared_however_many_numbers_come_before():
    chosen = CommonSeries()
    names = [*(f"n{i}" for i in range(MOST_NAMES + 5)), "loss", "learning_rate"]
    taken = [name for name in names if chosen.takes(Series(name, name, scalar=True))]
    assert taken == [*names[:MOST_NAMES], "loss", "learning_rate"]
    assert not chosen.takes(Series("repeated_samples.input.0", "repeated_samples.input.0", scalar=True))


def test_too_few_common_values_are_chance():
    rule = CommonNumbersRule()
    common(rule, LEARNED - 1, 2)
    assert judged(rule, LEARNED, (0.5, 0.7)) == []


def test_a_number_of_one_rank_alone_and_the_seventeenth_are_left_out():
    rule = CommonNumbersRule()
    for i in range(MOST_NAMES):
        judged(rule, 0, (0.5, 0.5), f"n{i}")
    for step in range(60):
        assert judged(rule, step, (0.5 + step / 7, 0.5 + step / 7 + (step == 50)), "late") == []
        assert judged(rule, step, (0.5 + step / 7, None), "n0") == []


def test_a_recorder_leaves_out_what_each_of_its_ranks_has_for_itself():
    rule, choice = CommonNumbersRule(), random.Random(0)
    for step in range(LEARNED + 5):
        rule.take(step, 0, "loss", choice.random())
        rule.take(step, 1, "loss", choice.random())
        same = choice.random()
        for number in range(2):
            rule.take(step, number, "grad_norm", same)
        sent = rule.left(step)
        assert sent["grad_norm"] == [(same, [0, 1])]
        assert ("loss" in sent) == (step < LEARNED - 1)
