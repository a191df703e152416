"""Each mistake with several ranks raises its own error, at `watch` or at the first step."""

import pytest
import torch
import wrong_calls

import trainsentry


def errors(found):
    assert not any(succeeded for succeeded, _ in found), found
    return [(kind, message) for _, (kind, message, _) in found]


def test_a_process_group_that_is_not_initialized(out, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 4.*init_process_group"):
        trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_ranks_beyond_the_world(two_ranks, tmp_path):
    for kind, message in errors(two_ranks.outcomes(wrong_calls.ranks_beyond_the_world, tmp_path)):
        assert kind == "ConfigError"
        assert message == "ranks: 5 does not exist; allowed: 0 to 1"


@pytest.mark.parametrize("how", ["ddp", "fully_shard", "fsdp1"])
def test_a_model_wrapped_after_watch(two_ranks, tmp_path, how):
    for kind, message in errors(two_ranks.outcomes(wrong_calls.wrapped_late, tmp_path, how)):
        assert kind == "WrappedLate"
        assert ("DistributedDataParallel" if how == "ddp" else "fully_shard") in message


def test_an_optimizer_made_before_fully_shard(two_ranks, tmp_path):
    for kind, message in errors(two_ranks.outcomes(wrong_calls.stale_optimizer, tmp_path)):
        assert kind == "ValueError"
        assert "before fully_shard" in message


def test_ranks_that_do_not_come_are_named(two_ranks, tmp_path):
    first, second = two_ranks.outcomes(wrong_calls.only_rank_0_watches, tmp_path)
    assert second == (True, None)
    assert not first[0]
    assert "rank 1 did not call watch() within 1 s" in first[1][1]


def test_ranks_that_cannot_connect_are_watched_each_on_its_own(two_ranks, tmp_path):
    """As after a restart by torchrun: gloo finds the addresses of the ranks that are gone."""
    for steps, warning in two_ranks.run(wrong_calls.no_group_can_be_made, tmp_path):
        assert steps == 3
        assert "each rank is watched on its own: the ranks cannot connect to each other: Gloo" in warning


def test_another_configuration_on_another_rank(two_ranks, tmp_path):
    found = errors(two_ranks.outcomes(wrong_calls.different_configurations, tmp_path))
    assert [kind for kind, _ in found] == ["ConfigError"] * 2
    assert "eps: 0.0 on rank 0, 1.0 on rank 1" in found[0][1]


def test_after_a_mistake_the_next_watch_works(two_ranks, tmp_path):
    assert two_ranks.run(wrong_calls.all_is_well, tmp_path) == [3, 3]
