"""When a step does not end, every rank names the missing one and its collective, and goes on when it arrives."""

import hanging
import pytest


@pytest.mark.parametrize("sleeper", [0, 1])
def test_the_rank_that_never_came_and_the_collective_are_named(two_ranks, tmp_path, sleeper):
    found = two_ranks.run(hanging.run, tmp_path, sleeper)
    waiting, _, stacks, incidents = found[1 - sleeper]
    assert f"rank {1 - sleeper} has been in step 4" in waiting
    assert "at all_reduce number 8 of group 'world'" in waiting
    assert f"Rank {sleeper} is missing: it is in step 4 at hanging.py" in waiting
    assert "all_reduce" in stacks
    (incident,) = incidents
    assert (incident["kind"], incident["rank"], incident["step"]) == ("hang", sleeper, 4)
    assert (incident["name"], incident["quantity"]) == ("world.all_reduce", "communication_input")
    assert f"rank {sleeper} is missing in step 4: other ranks wait for it in call 8 of" in incident["summary"]
    missing, _, stacks, _ = found[sleeper]
    assert "in step 4 for 1 s, at hanging.py" in missing
    assert "hanging.py" in stacks
    assert [done for _, done, *_ in found] == [6, 6], "nothing was ended, and the run went on"


def test_under_ddp_the_call_of_its_reducer_is_named(two_ranks, tmp_path):
    found = two_ranks.run(hanging.run, tmp_path, 1, ddp=True)
    assert [done for _, done, *_ in found] == [6, 6]
    assert "backward" in found[0][2]
    assert "Rank 1 is missing: it is in step 4 at hanging.py" in found[0][0]
    assert "while others wait in all_reduce number" in found[0][0]
    (incident,) = found[0][3]
    assert (incident["kind"], incident["rank"], incident["name"]) == ("hang", 1, "world.all_reduce")
