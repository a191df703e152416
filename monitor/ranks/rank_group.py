"""The ranks of a run: their rendezvous, their consensus, and the position of this rank's recorder in the tree."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from trainsentry.collectors.backend import Framework, Rendezvous
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.ranks.connection import RendezvousBroken
from trainsentry.collectors.settings import PARTS
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.errors import ConfigError
from trainsentry.monitor.ranks.consensus import Consensus
from trainsentry.monitor.ranks.hang_watch import HangWatch
from trainsentry.monitor.ranks.recorder_address import RecorderAddress, find_position
from trainsentry.monitor.schedule import Schedule

PATIENCE_SECONDS: Final = 60.0
"""Seconds, once in a run, that a rank waits for a late proposal (of a rank that saves a checkpoint or compiles)."""

MANY_RANKS: Final = 64
"""With at least this many ranks, only one rank per host writes files; others start when an incident names them. 4,096
ranks would write some forty thousand files, and shared file systems are slowest at opening files."""


class RankGroup:
    """One rank's connections to the others; watched and unwatched ranks have one each."""

    def __init__(
        self, config: MonitorConfig, framework: Framework, rendezvous: Rendezvous, watched: list[int], guard: Guard
    ) -> None:
        self.rendezvous = rendezvous
        self.schedule = Schedule(config, several_ranks=True)
        try:
            _check_same(config, rendezvous)
        except ConfigError:
            rendezvous.close()
            raise
        costs = 2 + len(PARTS) + 1 if config.overhead_budget is not None else 0
        max_reduce = framework.max_reduce(rendezvous, PATIENCE_SECONDS)
        self.consensus = Consensus(rendezvous, max_reduce, self.schedule, guard, costs=costs)
        self.hangs: HangWatch | None = None
        try:
            self._recorder_address: RecorderAddress | None = RecorderAddress(rendezvous.rank)
        except OSError as error:
            guard.warn_once("recorders of other ranks", f"no socket for other ranks can be opened: {error}")
            self._recorder_address = None
        self.position = find_position(rendezvous, self._recorder_address, rendezvous.rank in watched)
        many = len(watched) >= MANY_RANKS and config.ranks == "all"
        self.quiet = many and self.position is not None and not self.position.heads

    def watch_for_hangs(self, config: MonitorConfig, report: Callable[[], dict[str, Any]]) -> None:
        """Start the watch for hangs, if configured; `report` returns what this rank is doing."""
        settings, rank = config.hang_check, self.rendezvous.rank
        if settings is None:
            return
        directory = Path(config.output_dir).absolute() / f"rank{rank}"
        store = self.rendezvous.store
        self.hangs = HangWatch(settings.seconds, report, store, directory, rank=rank, abort=settings.abort)
        self.consensus.hangs = self.hangs

    def stop_listening(self) -> None:
        """Close the address for other ranks' recorders: this rank has no recorder to answer them."""
        if self._recorder_address is not None:
            self._recorder_address.close()
            self._recorder_address = None

    def close(self) -> None:
        """Leave the group; the other ranks go on."""
        if self.hangs is not None:
            self.hangs.close()
        self.stop_listening()
        self.consensus.close()
        self.rendezvous.close(broken=self.consensus.broken)


def join_ranks(config: MonitorConfig, framework: Framework, watched: list[int], guard: Guard) -> RankGroup | None:
    """Return this rank's group once all ranks have joined; None for a single rank, and where they cannot connect."""
    rendezvous: Rendezvous | None = None
    try:
        rendezvous = framework.meet()
        return RankGroup(config, framework, rendezvous, watched, guard) if rendezvous is not None else None
    except RendezvousBroken as error:
        guard.warn_once("ranks", f"each rank is watched on its own: {error}")
        if rendezvous is not None:
            rendezvous.close(broken=True)
        return None


def _check_same(config: MonitorConfig, rendezvous: Rendezvous) -> None:
    """Check that all ranks have the same configuration, so that they sample the same steps.

    Raises:
        ConfigError: when another rank has a different one; names the rank and a key.

    """
    here = config.model_dump(mode="json")
    here.pop("output_dir")
    text = json.dumps(here, sort_keys=True).encode()
    if len(set(map(str, rendezvous.exchange(hashlib.sha256(text).hexdigest())))) == 1:
        return  # the hashes first: configurations of thousands of ranks, sent to each rank, would be gigabytes
    for rank, found in enumerate(rendezvous.exchange(here)):
        other = found if isinstance(found, dict) else {}
        different = [key for key in here if here[key] != other.get(key)]
        if different:
            key = different[0]
            raise ConfigError(
                f"{key}: {here[key]!r} on rank {rendezvous.rank}, {other.get(key)!r} on rank {rank}; allowed: the same "
                "configuration on every rank"
            )
