"""When a step of a training on the device does not end, the missing rank is named, with the stacks of all threads."""

import hanging
from the_device import DEVICE


def test_the_rank_that_never_came_is_named_and_its_stacks_are_written(two_ranks, tmp_path):
    found = two_ranks.run(hanging.run, tmp_path, 1, device=str(DEVICE))
    waiting, done, stacks, [incident] = found[0]
    assert "at all_reduce number 8 of group 'world'" in waiting
    assert "Rank 1 is missing: it is in step 4 at hanging.py" in waiting
    assert "all_reduce" in stacks
    assert done == 6
    assert (incident["kind"], incident["rank"], incident["step"]) == ("hang", 1, 4)
    _, _, stacks, _ = found[1]
    assert "hanging.py" in stacks
