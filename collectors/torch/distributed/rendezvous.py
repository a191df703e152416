"""Rendezvous of torch's ranks in `watch`: the monitor's own gloo group, max-reduces over it, and the ranks' store."""

import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from trainsentry.collectors.ranks.connection import RendezvousBroken, ranks_named
from trainsentry.collectors.ranks.handshake import secret_for
from trainsentry.collectors.ranks.run_secret import given_secret
from trainsentry.collectors.torch.device.cpu import CPU

RENDEZVOUS_SECONDS: Final = 60.0
"""How long the ranks wait for the last one to call `watch`: models are built and loaded at different speeds."""

GROUP_SECONDS: Final = 180.0
"""How long an exchange may take; ranks that train together are at most a step apart when one begins."""

PATIENCE_SHARE: Final = 0.25
LEAST_PATIENCE: Final = 10.0
LARGEST_SHARE: Final = 0.5
"""Share of the training's own timeout that a rank waits for another at most: where the ranks take different numbers of
steps, the other one may be waiting for this one in a collective of the training. Of a short timeout it is up to a half,
as one rank may write a checkpoint for some seconds."""

POLL_SECONDS: Final = 0.02
"""Pause between two looks at the store for ranks that have not joined."""

GAVE_UP: Final = "gave_up"
LOOK_EVERY: Final = 1.0
"""The key in the store by which a rank says that it waits no longer, and seconds between two looks at it."""

_count = 0
_left: list[Any] = []


class GroupRendezvous:
    """All ranks of a run, watched or not; they exchange values over `group`, the monitor's own gloo group.

    Its exchanges wait for no accelerator and do not mix with the training's collectives. All ranks know `secret`, and
    so may anyone who can read the process group's network.
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
        """Gather one value from every rank; return them in rank order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, self.group)
        return found

    def close(self, *, broken: bool = False) -> None:
        """Destroy the group; a `broken` one, in which an exchange failed, is kept: destroying it would block."""
        group, self.group = self.group, None
        if broken:
            _left.append(group)
        elif group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _broadcast_random(group: Any, rank: int) -> str:
    """Return a random text that rank 0 draws and broadcasts."""
    drawn = [secrets.token_hex(32) if rank == 0 else None]
    dist.broadcast_object_list(drawn, src=0, group=group)
    return str(drawn[0])


class GroupStore:
    """Key-value store of the ranks, in the process group's own store; reading it does not block."""

    def __init__(self, store: Any, size: int) -> None:
        self.store = store
        self.size = size

    def put(self, key: str, text: str) -> None:
        """Store a text."""
        self.store.set(key, text)

    def all(self, prefix: str) -> dict[int, str]:
        """Return the texts stored under `<prefix>/<rank>`, by rank."""
        keys = {rank: f"{prefix}/{rank}" for rank in range(self.size)}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}


def meet(timeout: float = RENDEZVOUS_SECONDS) -> GroupRendezvous | None:
    """Wait until every rank has joined; return None for a single rank.

    Raises:
        RuntimeError: when the launcher started several ranks but `torch.distributed` is not initialized, or when a
            rank has not joined within `timeout` seconds.
        RendezvousBroken: when all have joined, but cannot connect to each other.
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
    try:
        group = dist.new_group(backend=CPU.collectives, timeout=timedelta(seconds=GROUP_SECONDS))
        drawn = _broadcast_random(group, rank)
    except RuntimeError as error:  # after a restart, gloo may find the addresses of ranks that are gone
        raise RendezvousBroken(f"the ranks cannot connect to each other: {error}") from error
    secret = drawn if given is None else secret_for(given, "run", drawn)
    return GroupRendezvous(group, rank, size, GroupStore(store, size), secret)


def _gather_at_store(rank: int, size: int, timeout: float) -> Any:
    """Wait in the run's store until all ranks have joined: only the store can tell which are missing."""
    global _count  # noqa: PLW0603 - the same on every rank: each calls `watch` equally often
    _count += 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store outlives the ranks it restarts
    prefix = f"trainsentry/restart{restart}/meeting{_count}"
    store = dist.distributed_c10d.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
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
    """Computes the element-wise maximum over all ranks, watched or not, while their steps go on.

    For a single rank (`rendezvous` is None) the result is its own values.
    """

    def __init__(self, rendezvous: GroupRendezvous | None, max_wait: float) -> None:
        self._max_wait = max_wait if rendezvous is None else min(max_wait, _patience(_training_timeout()))
        self._rendezvous = rendezvous
        self._values: torch.Tensor | None = None
        self._work: Any = None

    def propose(self, values: Sequence[float]) -> None:
        """Start a max-reduce; every rank proposes equally many values."""
        self._values = torch.tensor(values, dtype=torch.float64, device="cpu")
        if self._rendezvous is not None:
            self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, self._rendezvous.group, async_op=True)

    def result(self) -> list[float] | None:
        """Wait for the other ranks; return the element-wise maximum, or None when nothing was proposed.

        Raises:
            TimeoutError: when a rank proposes nothing within `max_wait` seconds, or a part of the training's own
                timeout, or another rank has said that it waits no longer.

        """
        if self._values is None:
            return None
        if self._rendezvous is not None and self._work is not None:
            self._wait_for_others(self._rendezvous.store)
        values, self._values, self._work = self._values, None, None
        agreed: list[float] = values.tolist()
        return agreed

    def _wait_for_others(self, store: "GroupStore") -> None:
        """Wait for the max-reduce; a rank that gives up tells the others, which do not wait for it in turn."""
        why, end = "", time.monotonic() + self._max_wait
        try:
            while not why and not self._comes_within(min(LOOK_EVERY, max(end - time.monotonic(), POLL_SECONDS))):
                if store.store.check([GAVE_UP]):
                    why = "another rank waits for the others no longer"
                elif time.monotonic() >= end:
                    why = f"another rank has not ended its step in {self._max_wait:.0f} s"
        except RuntimeError as error:
            why = f"another rank has left ({str(error).partition(chr(10))[0]})"
        if why:
            with contextlib.suppress(RuntimeError):  # the store may have ended with its rank
                store.put(GAVE_UP, "")
            raise TimeoutError(
                f"{why}: do all ranks take the same steps? From now on each rank samples, dumps and stops for itself"
            )

    def _comes_within(self, seconds: float) -> bool:
        """Return whether the answer is there after so many seconds; one that failed raises what it failed by."""
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # it may have come a moment too late
        return True


def _patience(timeout: float) -> float:
    """Return the seconds to wait for another rank, by the training's own timeout.

    >>> _patience(8.0), _patience(30.0), _patience(1800.0)
    (4.0, 10.0, 450.0)
    """
    return max(PATIENCE_SHARE * timeout, min(LEAST_PATIENCE, LARGEST_SHARE * timeout))


def _training_timeout() -> float:
    """Return the seconds after which the training's own collectives fail, infinite where its group does not tell."""
    try:
        default = dist.distributed_c10d._get_default_group()
        found = [default._get_backend(device).options._timeout for device in default._device_types]
        return float(min(timeout.total_seconds() for timeout in found))
    except Exception:  # noqa: BLE001 - whatever another backend or version of torch raises
        return float("inf")
