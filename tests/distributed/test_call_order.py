"""All ranks call the same collectives in the same order, at every step."""

import other_order
import pytest


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_goes_its_own_way_once_is_named_though_the_step_was_not_sampled(four_ranks, tmp_path, rank):
    found = [incidents for incidents, _ in four_ranks.run(other_order.run, tmp_path, rank)]
    [(kind, step, named, suspects, summary)] = found[0]
    assert (kind, step, named, suspects) == ("communication_mismatch", other_order.STEP, rank, 1)
    assert f"rank {rank} called other collectives than other ranks in step {other_order.STEP}" in summary


def test_ranks_that_call_the_same_have_the_same_number_at_every_step_and_nothing_is_said(four_ranks, tmp_path):
    found = four_ranks.run(other_order.run, tmp_path)
    assert [incidents for incidents, _ in found] == [[]] * 4
    assert all(len(numbers) == 40 and numbers == found[0][1] for _, numbers in found), "sends and receives do not count"
    assert len(set(found[0][1][1:])) == 1


def test_a_rank_whose_calls_come_from_another_thread_has_no_number_in_that_step_and_nothing_is_said(
    four_ranks, tmp_path
):
    """As the second and third reduction of PowerSGD's hook, which run where another one finishes."""
    found = four_ranks.run(other_order.run, tmp_path, 3, in_thread=True)
    assert [incidents for incidents, _ in found] == [[]] * 4
    assert [len(numbers) for _, numbers in found] == [40, 40, 40, 39]
