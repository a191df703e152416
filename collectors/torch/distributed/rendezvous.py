"""Where the ranks of a run meet in `watch`, the group that the monitor talks over, and maxima over that group."""

import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from trainsentry.collectors.ranks.connection import ranks_named
from trainsentry.collectors.ranks.handshake import secret_for
from trainsentry.collectors.ranks.run_secret import given_secret

MEETING_SECONDS: Final = 60.0
"""How long the ranks wait for the last one to call `watch`: models are built and loaded at different speed."""

GROUP_SECONDS: Final = 180.0
"""How long an exchange may take. Ranks that train together are a step apart at most when one begins."""

POLL_SECONDS: Final = 0.02

_meetings = 0
_left: list[Any] = []


class GroupRendezvous:
    """The ranks of a run, all of which take part, watched or not; `group` is a gloo group of the monitor's own.

    Nothing that is sent over it waits for an accelerator, nor does it get between the training's own collectives.
    `secret` is known to all ranks; nobody else knows it who is not on the network of the process group.
    """

    def __init__(self, group: Any, rank: int, size: int, store: "GroupStore", secret: str = "") -> None:
        self.group = group
        self.secret = secret
        self.rank = rank
        self.size = size
        self.store = store

    @property
    def name(self) -> str:
        """The group's name."""
        return str(self.group.group_name)

    def exchange(self, mine: Any) -> list[Any]:
        """Return what every rank gives, in the order of ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, self.group)
        return found

    def close(self, *, broken: bool = False) -> None:
        """Leave the group; one in which an exchange has failed is left as it is, for to end it would be to wait."""
        group, self.group = self.group, None
        if broken:
            _left.append(group)
        elif group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _told_by_first(group: Any, rank: int) -> str:
    """Return a random text that rank 0 tells all others."""
    told = [secrets.token_hex(32) if rank == 0 else None]
    dist.broadcast_object_list(told, src=0, group=group)
    return str(told[0])


class GroupStore:
    """Where ranks leave words for each other that are read without waiting: the run's store."""

    def __init__(self, store: Any, size: int) -> None:
        self.store = store
        self.size = size

    def put(self, key: str, text: str) -> None:
        """Leave a word."""
        self.store.set(key, text)

    def all(self, prefix: str) -> dict[int, str]:
        """Return what the ranks have left under `<prefix>/<rank>`."""
        keys = {rank: f"{prefix}/{rank}" for rank in range(self.size)}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}


def meet(timeout: float = MEETING_SECONDS) -> GroupRendezvous | None:
    """Wait until every rank has come; return None where there is one rank only.

    Raises:
        RuntimeError: when the launcher started several ranks and `torch.distributed` does not know of them, or when
            some ranks have not come after `timeout` seconds.
        ValueError: when the environment's secret is too short.

    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if not dist.is_available() or not dist.is_initialized():
        if launched > 1:
            raise RuntimeError(
                f"watch: WORLD_SIZE is {launched}, but torch.distributed is not initialized; allowed: "
                "init_process_group (or a wrapper that calls it) before watch()"
            )
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return None
    given = given_secret()
    store = _gather_at_store(rank, size, timeout)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_SECONDS))
    told = _told_by_first(group, rank)
    secret = told if given is None else secret_for(given, "run", told)
    return GroupRendezvous(group, rank, size, GroupStore(store, size), secret)


def _gather_at_store(rank: int, size: int, timeout: float) -> Any:
    """Wait at the run's store until all ranks have come: it alone can say who has not."""
    global _meetings  # noqa: PLW0603 - the same count on every rank: `watch` is called as often on each
    _meetings += 1
    place = f"trainsentry/meeting{_meetings}"
    store = dist.distributed_c10d.PrefixStore(place, dist.distributed_c10d._get_default_store())
    store.set(f"rank{rank}", "here")
    if store.add("count", 1) == size:
        store.set("all", "here")
    end = time.monotonic() + timeout
    while not store.check(["all"]):
        if time.monotonic() > end:
            missing = [r for r in range(size) if not store.check([f"rank{r}"])]
            raise RuntimeError(
                f"watch: {ranks_named(missing)} did not call watch() within {timeout:.0f} s; allowed: watch() is "
                "called on every rank, also on those that `ranks` leaves out"
            )
        time.sleep(POLL_SECONDS)
    return store


class GroupMaxReduce:
    """Finds the greatest of what the ranks propose, while their steps go on.

    Every rank takes part, watched or not. Alone (`rendezvous` is None) a rank agrees with itself.
    """

    def __init__(self, rendezvous: GroupRendezvous | None, max_wait: float) -> None:
        self._max_wait = timedelta(seconds=max_wait)
        self._rendezvous = rendezvous
        self._values: torch.Tensor | None = None
        self._work: Any = None

    def propose(self, values: Sequence[float]) -> None:
        """Begin to agree on values, as many on every rank."""
        self._values = torch.tensor(values, dtype=torch.float64)
        if self._rendezvous is not None:
            self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, self._rendezvous.group, async_op=True)

    def result(self) -> list[float] | None:
        """Return the greatest of each value, waiting for the other ranks; None when nothing was proposed.

        Raises:
            RuntimeError: when a rank has not proposed anything within `max_wait` seconds.

        """
        if self._values is None:
            return None
        if self._work is not None:
            self._work.wait(self._max_wait)
        values, self._values, self._work = self._values, None, None
        agreed: list[float] = values.tolist()
        return agreed
