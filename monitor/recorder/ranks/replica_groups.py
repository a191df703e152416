"""What several ranks hold alike, compared by fingerprint; the root of the recorders says who has parted.

Among the ranks of one host a minority of all may be the majority, and one that has parted from one other cannot be told
from it. So a recorder that is not the root sends the differing copies on, rank by rank, and no verdict.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.across_ranks.replicas import ReplicaRule, ReplicasOfStep
from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.collectors.series import GRADIENT, PARAMETER, UNKNOWN_REGION, SeriesTable
from trainsentry.collectors.statistics import fingerprints

PARTED: Final = -1
"""Stands where a fingerprint would, in a row for ranks whose copies differ."""

MAX_SENT_TENSORS: Final = 64
"""Tensors of a step whose differing copies are sent on: the first of them tell which rank has parted."""

Ints = npt.NDArray[np.int64]

Copy = tuple[int, int, int, int]
"""A key, a rank, its fingerprint, and the last step at which the copies were equal."""

Origin = tuple[int, int]
"""The rank that has sent something, and how often it had gone back to an earlier step."""

_LOW: Final = np.int64(2**32 - 1)


class ReplicaGroups:
    """Compares the copies of a step. A key is a series of `table`, shifted by 32 bits, and a layout.

    With `judges`, ranks that have parted are named.
    """

    def __init__(self, table: SeriesTable, *, judges: bool) -> None:
        self.table = table
        self.judges = judges
        self.parted: list[Anomaly] = []
        self._rule = ReplicaRule()
        self._told: dict[int, list[tuple[Origin, list[Copy]]]] = {}
        self._left: dict[int, list[Copy]] = {}

    def take(self, step: int, origin: Origin, copies: list[Copy]) -> None:
        """Take the differing copies of ranks that report to another recorder."""
        if copies:
            self._told.setdefault(step, []).append((origin, copies))

    def drop(self, step: int, is_old: Callable[[Origin], bool]) -> None:
        """Forget what was told of steps from `step` on, as far as it is old."""
        for s in [s for s in self._told if s >= step]:
            self._told[s] = [told for told in self._told[s] if not is_old(told[0])]

    def left(self, step: int) -> dict[int, list[Copy]]:
        """Return, and forget, the differing copies of steps up to `step`: for the next recorder of the tree."""
        return {s: self._left.pop(s) for s in sorted(self._left) if s <= step}

    def compare(
        self, step: int, keys: Ints, ranks: Ints, values: npt.NDArray[np.float64]
    ) -> tuple[Ints, list[ReplicasOfStep]]:
        """Compare the copies of a step, one row each; return the series of what only has the name in common.

        And the copies that differ, of what was equal before.
        """
        told = [copy for _, copies in self._told.pop(step, []) for copy in copies]
        for old in [s for s in self._told if s < step]:
            del self._told[old]
        rows = np.flatnonzero(self._comparable(keys))
        prints = fingerprints(values[rows])
        rows, prints = rows[prints != PARTED], prints[prints != PARTED]
        keys, ranks = keys[rows], ranks[rows]
        if told:
            more = np.asarray(told, np.int64).T
            keys, ranks, prints = (np.concatenate([a, b]) for a, b in zip((keys, ranks, prints), more[:3], strict=True))
            for key, _, _, equal_at in told:  # who has told it has compared them before
                self._rule.vouch(key, equal_at)
        differing = self._differing(step, keys, ranks, prints) if len(keys) else []
        return self._strangers(), differing

    def _comparable(self, keys: Ints) -> npt.NDArray[np.bool_]:
        """Whether keys are compared, each.

        What an update or the state makes of parted copies is an effect; what is no known part is nobody's replica.
        """
        compared = np.asarray([x.quantity in {PARAMETER, GRADIENT} for x in self.table.series], bool)
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
    """Return which rows are copies that fewer ranks have than another one."""
    found = np.zeros(len(keys), bool)
    for copies in differing:
        camps = Counter(copies.prints.values())
        most = max(camps.values())
        good = [rank for rank, fingerprint in copies.prints.items() if camps[fingerprint] == most]
        found |= (keys == copies.key) & ~np.isin(ranks, good)
    return found
