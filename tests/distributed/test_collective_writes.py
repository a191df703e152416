"""What a collective fills is recorded as it was before and as it is after: autograd does not count such a change."""

import pytest
import written_by_collectives


@pytest.mark.parametrize("communication", [False, True], ids=["", "collectives recorded"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("way", ["detached", "forward", "backward"])
def test_an_activation_is_recorded_as_the_module_made_it(two_ranks, tmp_path, way, on_device, communication):
    for seen, found in two_ranks.run(written_by_collectives.recorded, tmp_path, way, on_device, communication):
        assert set(seen) == {"a.output.0", "b.input.0"}
        assert found == pytest.approx(seen, rel=1e-6)


def test_a_dump_has_the_gradient_that_arrived(two_ranks, tmp_path):
    for found, true in two_ranks.run(written_by_collectives.dumped, tmp_path):
        assert found == pytest.approx(true, rel=1e-6)
