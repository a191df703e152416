"""Settings that both runs know are compared; what ranks choose for themselves only where a rank has its own state."""

import math

import pytest

from trainsentry.anomaly.checkpoints.comparison import Resumed
from trainsentry.anomaly.checkpoints.saved_fingerprints import Saved
from trainsentry.anomaly.checkpoints.setting_changes import setting_changes

DROPOUT = "constant.p"


def words(saved, now, *, rank=0, saved_rank=0, world=1, saved_world=1):
    """Return what is said of one rank."""
    before = Saved(100, saved_rank, saved_world, {}, settings=saved)
    resumed = Resumed(rank, world, Saved.from_text(before.to_text()), {}, settings=now)
    return [change.words.removesuffix(" when step 100 was saved") for change in setting_changes({rank: resumed})]


def test_what_is_alike_at_several_modules_is_said_once():
    saved = {DROPOUT: {"a": 0.1, "b": 0.1, "c": 0.2}}
    assert words(saved, {DROPOUT: {"a": 0.3, "b": 0.3, "c": 0.2}}) == [
        "p of module a (and 1 other) is 0.3, and was 0.1"
    ]


@pytest.mark.parametrize("now", [{}, {DROPOUT: {}}, {DROPOUT: {"other": 0.5}}, {"new kind": {"a": 1}}])
def test_what_one_run_does_not_know_is_not_compared(now):
    assert words({DROPOUT: {"a": 0.1}}, now) == []


@pytest.mark.parametrize(
    ("was", "now", "is_told"),
    [
        (0.1, 0.11, False),
        (0.1, 0.2, True),
        (0, 0.1, True),
        (1, -1, True),
        (math.inf, 5.0, True),
        (5.0, math.inf, True),
        (-math.inf, -math.inf, False),
        (math.nan, math.nan, False),
        (math.nan, 1.0, True),
        (True, 1.5, True),
    ],
)
def test_a_constant_may_move_by_a_step_of_a_schedule(was, now, is_told):
    assert bool(words({DROPOUT: {"a": was}}, {DROPOUT: {"a": now}})) == is_told


def test_another_rank_s_state_or_another_world_says_nothing_of_inputs_passes_and_operations():
    saved = {"input": {"input.0": "int64 [8, 32]"}, "passes": {"": 1}, "operations": {"a": "add 1"}}
    now = {"input": {"input.0": "float32 [8, 32, 64]"}, "passes": {"": 4}, "operations": {"a": "mul 1"}}
    assert len(words(saved, now)) == 3
    assert words(saved, now, rank=1, world=2, saved_world=2) == []
    assert words(saved, now, saved_world=2) == []


@pytest.mark.parametrize(("was", "now", "is_told"), [("0 1", "1", False), ("1", "0", True), ("1", "2", True)])
def test_writes_of_gradients_are_told_where_the_run_had_no_such_count(was, now, is_told):
    assert bool(words({"gradient writes": {"": was}}, {"gradient writes": {"": now}})) == is_told


@pytest.mark.parametrize(
    "other", ["software", "autocast", "passes", "trained", "optimizer", "wrapped", "input", "class"]
)
def test_writes_that_follow_another_setting_or_other_software_are_left_out(other):
    saved = {"gradient writes": {"": "1"}, other: {"": "0"}}
    said = words(saved, {"gradient writes": {"": "0"}, other: {"": "1"}})
    assert not any("written" in sentence for sentence in said)


def test_operations_that_follow_another_setting_or_other_software_are_left_out():
    saved = {"operations": {"a": "dropout 1, add 1"}, DROPOUT: {"a": 0.1}, "software": {"": "torch 2.13.0 on cpu"}}
    now = {**saved, "operations": {"a": "add 1"}}
    assert words(saved, now) == ["module a computes otherwise (without dropout) than"]
    assert words(saved, {**now, DROPOUT: {"a": 0.0}}) == ["p of module a is 0, and was 0.1"]
    assert words(saved, {**now, "software": {"": "torch 2.15.0 on cuda"}}) == []


def test_optimizers_of_another_number_do_not_correspond():
    assert words({"optimizer": {"0": "SGD", "1": "Adam"}}, {"optimizer": {"0": "Adam"}}) == []


def test_what_differs_on_all_ranks_is_said_of_the_lowest():
    saved = Saved(100, 0, 2, {}, settings={DROPOUT: {"a": 0.1}})
    ranks = {rank: Resumed(rank, 2, saved, {}, settings={DROPOUT: {"a": 0.3}}) for rank in (0, 1)}
    [change] = setting_changes(ranks)
    assert change.rank == 0
