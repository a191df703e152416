"""Ranks meet at the store of their own start, not at what an earlier one has left there."""

import pytest
import torch.distributed as dist

from trainsentry.collectors.torch.distributed import rendezvous

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


def test_a_restart_does_not_meet_the_ranks_that_are_gone(monkeypatch):
    """The agent of torchrun keeps its store over a restart of its workers."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def start(restart, rank, size=2):
        monkeypatch.setattr(rendezvous, "_count", 0)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        return rendezvous._gather_at_store(rank, size, 0.2)

    with pytest.raises(RuntimeError, match="rank 1 did not call watch"):
        start(0, 0)
    start(0, 1)
    with pytest.raises(RuntimeError, match="rank 1 did not call watch"):
        start(1, 0)
