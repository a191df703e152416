"""Compares the replicas of several ranks by fingerprint; the root recorder decides which ranks differ.

A minority of all ranks may be the majority on one host, and of two differing copies neither is known to be wrong. So a
recorder below the root sends the differing copies of each rank up the tree, without a verdict.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.across_ranks.replicas import ReplicaRule, ReplicasOfStep
from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.collectors.series import BUFFER, GRADIENT, PARAMETER, UNKNOWN_REGION, SeriesTable
from trainsentry.collectors.statistics import fingerprints

PARTED: Final = -1
"""Replaces the fingerprint in a row for ranks whose copies differ."""

MAX_SENT_TENSORS: Final = 64
"""Tensors of a step whose differing copies are sent up; the first ones already show which rank differs."""

Ints = npt.NDArray[np.int64]

Copy = tuple[int, int, int, int]
"""Key, rank, fingerprint, and the last step at which the copies were equal."""

Origin = tuple[int, int]
"""The sending rank, and its number of rollbacks so far."""

_LOW: Final = np.int64(2**32 - 1)


class ReplicaGroups:
    """Compares the copies of a step. A key is a series id of `table`, shifted by 32 bits, and a layout id.

    With `judges`, anomalies for ranks that differ are added to `parted`.
    """

    def __init__(self, table: SeriesTable, *, judges: bool) -> None:
        self.table = table
        self.judges = judges
        self.parted: list[Anomaly] = []
        self._rule = ReplicaRule()
        self._received: dict[int, list[tuple[Origin, list[Copy]]]] = {}
        self._left: dict[int, list[Copy]] = {}

    def take(self, step: int, origin: Origin, copies: list[Copy]) -> None:
        """Add the differing copies of ranks that report to another recorder."""
        if copies:
            self._received.setdefault(step, []).append((origin, copies))

    def drop(self, step: int, is_old: Callable[[Origin], bool]) -> None:
        """Drop received copies of steps from `step` on whose origin is old."""
        for s in [s for s in self._received if s >= step]:
            self._received[s] = [entry for entry in self._received[s] if not is_old(entry[0])]

    def left(self, step: int) -> dict[int, list[Copy]]:
        """Remove and return the differing copies of steps up to `step`, for the next recorder of the tree."""
        return {s: self._left.pop(s) for s in sorted(self._left) if s <= step}

    def compare(
        self, step: int, keys: Ints, ranks: Ints, values: npt.NDArray[np.float64]
    ) -> tuple[Ints, list[ReplicasOfStep]]:
        """Compare the copies of a step, one row each.

        Returns the series whose tensors share only their name, and the differing copies of tensors that were equal.
        """
        received = [copy for _, copies in self._received.pop(step, []) for copy in copies]
        for old in [s for s in self._received if s < step]:
            del self._received[old]
        rows = np.flatnonzero(self._comparable(keys))
        prints = fingerprints(values[rows])
        rows, prints = rows[prints != PARTED], prints[prints != PARTED]
        keys, ranks = keys[rows], ranks[rows]
        if received:
            more = np.asarray(received, np.int64).T
            keys, ranks, prints = (np.concatenate([a, b]) for a, b in zip((keys, ranks, prints), more[:3], strict=True))
            for key, _, _, equal_at in received:  # the sender has found them equal before
                self._rule.vouch(key, equal_at)
        differing = self._differing(step, keys, ranks, prints) if len(keys) else []
        return self._strangers(), differing

    def _comparable(self, keys: Ints) -> npt.NDArray[np.bool_]:
        """Return whether each key is compared.

        Updates and optimizer state of differing copies only show the effect; a tensor of unknown region has no replica.
        """
        compared = np.asarray([x.quantity in {PARAMETER, BUFFER, GRADIENT} for x in self.table.series], bool)
        placed = np.asarray([x.region != UNKNOWN_REGION for x in self.table.layouts], bool)
        found: npt.NDArray[np.bool_] = compared[keys >> 32] & placed[keys & _LOW]
        return found

    def _differing(self, step: int, keys: Ints, ranks: Ints, prints: Ints) -> list[ReplicasOfStep]:
        order = np.lexsort((ranks, keys))
        keys, ranks, prints = keys[order], ranks[order], prints[order]
        again = np.append(False, (keys[1:] == keys[:-1]) & (ranks[1:] == ranks[:-1]))  # read twice in this step
        keys, ranks, prints = keys[~again], ranks[~again], prints[~again]
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        ends = np.append(starts[1:], len(keys))
        high, low = np.maximum.reduceat(prints, starts), np.minimum.reduceat(prints, starts)
        several = ends - starts > 1
        unequal = []
        for a, b in zip(starts[several & (high != low)], ends[several & (high != low)], strict=True):
            key, by_rank = int(keys[a]), dict(zip(ranks[a:b].tolist(), prints[a:b].tolist(), strict=True))
            unequal.append(ReplicasOfStep(key, self.table.series[key >> 32], by_rank))
        differing = [copies for copies in unequal if self._rule.are_replicas(copies)]
        equal = {int(keys[a]): int(prints[a]) for a in starts[several & (high == low)]}
        found = self._rule.judge(step, unequal, equal)
        if self.judges:
            self.parted += found
        elif differing:
            self._left[step] = [copy for copies in differing[:MAX_SENT_TENSORS] for copy in self._rank_by_rank(copies)]
        return differing

    def _rank_by_rank(self, copies: ReplicasOfStep) -> list[Copy]:
        equal_at = self._rule.equal_at[copies.key]
        return [(copies.key, rank, int(p), equal_at) for rank, p in copies.prints.items()]

    def _strangers(self) -> Ints:
        names = self._rule.stranger_names
        series = {key >> 32 for key in self._rule.strangers}
        series.update(i for i, s in enumerate(self.table.series) if names and (s.name, s.vpp_stage) in names)
        return np.asarray(sorted(series), np.int64)


def outvoted(differing: Iterable[ReplicasOfStep], keys: Ints, ranks: Ints) -> npt.NDArray[np.bool_]:
    """Return the rows whose copy fewer ranks hold than another copy; shape (n,)."""
    found = np.zeros(len(keys), bool)
    for copies in differing:
        camps = Counter(copies.prints.values())
        most = max(camps.values())
        good = [rank for rank, fingerprint in copies.prints.items() if camps[fingerprint] == most]
        found |= (keys == copies.key) & ~np.isin(ranks, good)
    return found
