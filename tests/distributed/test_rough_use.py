"""Rough uses of several ranks harm neither the run nor the monitor, and a rank that dies harms no later test."""

import os

import pytest
import rough_use
from rank_pool import RankFailure, RankPool


@pytest.fixture
def one_rank():
    """A pool of its own: the ranks of other tests must not die."""
    pool = RankPool(1)
    yield pool
    pool.close()


def test_a_rank_that_closes_first_is_not_waited_for(two_ranks, tmp_path):
    assert max(two_ranks.run(rough_use.rank_0_closes_first, tmp_path)) < 30


def test_the_module_inside_a_wrapper_may_be_watched(two_ranks, tmp_path):
    assert two_ranks.run(rough_use.inner_module, tmp_path) == [3, 3]


def test_a_work_that_nobody_waits_for_is_not_held(two_ranks, tmp_path):
    assert two_ranks.run(rough_use.works_nobody_waits_for, tmp_path) == [0, 0]


def test_collectives_of_other_threads_are_none_of_the_steps(two_ranks, tmp_path):
    assert two_ranks.run(rough_use.other_threads, tmp_path) == [({}, []), ({}, [])]


def test_dense_sampling_is_agreed_on_with_a_rank_whose_monitor_failed(two_ranks, tmp_path):
    found = two_ranks.run(rough_use.dense_beside_a_failed_monitor, tmp_path)
    assert [broken for broken, _ in found] == [False, False]
    assert found[0][1] == found[1][1] != (0, 0)


def test_a_rank_that_is_not_watched_counts_the_steps_of_every_model(two_ranks, tmp_path):
    assert two_ranks.run(rough_use.unwatched_rank_of_two_watches, tmp_path) == [(4, False)] * 2


def test_ranks_of_uneven_steps_wait_for_each_other_for_a_part_of_the_trainings_timeout(two_ranks, tmp_path):
    found = two_ranks.run(rough_use.uneven_steps, tmp_path)
    assert [patience for _, patience in found] == [4.0, 4.0]
    assert max(longest for longest, _ in found) < 30


def test_nobody_waits_in_turn_for_a_rank_that_has_given_up_waiting(two_ranks, tmp_path):
    """As ranks do whose data end early: one waits for the other, which then goes on with the next epoch."""
    (told, calls), _ = two_ranks.run(rough_use.one_gives_up, tmp_path)
    assert calls == 3
    assert told.startswith("another rank waits for the others no longer")


def test_a_rank_that_has_died_is_told_of_with_its_exit_code_and_replaced(one_rank):
    (first,) = one_rank.run(os.getpid)
    with pytest.raises(RankFailure, match="rank 0: EOFError: the process has died, exit code 7"):
        one_rank.run(os._exit, 7)
    (second,) = one_rank.run(os.getpid)
    assert second != first
