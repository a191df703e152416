"""Where optimizers come after `watch`, a rank that is left out counts the steps of the watched ones all the same."""

import late_optimizers
import pytest


@pytest.mark.parametrize("marked", [False, True])
def test_all_ranks_stop_at_the_same_step(two_ranks, tmp_path, marked):
    first, second = two_ranks.run(late_optimizers.stopped_at, tmp_path, [0], marked)
    assert first == second
    assert first is not None
    assert first[0] == first[1]
