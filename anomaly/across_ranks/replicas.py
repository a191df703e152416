"""Replicas that have parted: what several ranks hold alike must be alike to the bit."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from trainsentry.anomaly.anomaly import COMMUNICATION_MISMATCH, REPLICA_MISMATCH, Anomaly
from trainsentry.collectors.series import PARAMETER, Series

NAME: Final = "replicas"

SCORE: Final = 100.0
"""As strong as what is not finite: equal computations of equal numbers give equal bits."""


KEPT_EQUAL: Final = 2
"""Different values that copies must have had in common before they are taken for replicas: equal seeds make one, and
zeros, ones and what is frozen stay as they are."""


@dataclass(frozen=True)
class ReplicasOfStep:
    """One part of a tensor at one step, with the fingerprint that each rank has of it.

    A rank may speak for its whole host, where all have the same: that is one voice.
    """

    key: int
    series: Series
    prints: Mapping[int, float | int]


@dataclass
class ReplicaRule:
    """Names the ranks whose copy differs from that of most others, once for each copy.

    Only what was equal before counts as replicas: ranks of a pipeline, or with experts of their own, may call
    different tensors by one name, and those have differed from the start; and equal seeds make equal weights that
    each rank then trains by itself. So it takes `KEPT_EQUAL` different values. `stranger_names` are the names, with
    their model chunk, of others, which are different tensors; `strangers` are the keys of what has never been equal.

    With two ranks, or two camps of one size, none can be told from the other: then both sides are named, and
    `value` equals `expected`, which are the numbers of ranks that agree with this one and with the most.
    """

    equal_at: dict[int, int] = field(default_factory=dict)
    stranger_names: set[tuple[str, int]] = field(default_factory=set)
    strangers: set[int] = field(default_factory=set)
    _values: dict[int, set[int]] = field(default_factory=dict)
    _told: set[tuple[int, int]] = field(default_factory=set)

    def judge(self, step: int, unequal: Iterable[ReplicasOfStep], equal: Mapping[int, int]) -> list[Anomaly]:
        """Return an anomaly for each rank that has parted from the others.

        `equal` maps the keys of copies that were found equal at this step to their fingerprint.
        """
        for key, fingerprint in equal.items():
            values = self._values.setdefault(key, set())
            if len(values) < KEPT_EQUAL:
                values.add(fingerprint)
            self.equal_at[key] = step
        found = []
        for copies in unequal:
            if self.are_replicas(copies):
                found += self._parted(step, copies)
            elif copies.series.quantity == PARAMETER:
                self.stranger_names.add((copies.series.name, copies.series.vpp_stage))
            elif copies.key not in self.equal_at:
                self.strangers.add(copies.key)
        return found

    def vouch(self, key: int, step: int) -> None:
        """Take somebody's word that copies were equal while they changed, last at `step`."""
        self._values[key] = set(range(KEPT_EQUAL))
        self.equal_at[key] = max(step, self.equal_at.get(key, step))

    def are_replicas(self, copies: ReplicasOfStep) -> bool:
        """Whether copies have been equal before, while they changed."""
        name = (copies.series.name, copies.series.vpp_stage)
        return len(self._values.get(copies.key, ())) >= KEPT_EQUAL and name not in self.stranger_names

    def _parted(self, step: int, copies: ReplicasOfStep) -> list[Anomaly]:
        camps = Counter(copies.prints.values())
        most = max(camps.values())
        tie = sum(count == most for count in camps.values()) > 1
        found = []
        for rank, fingerprint in copies.prints.items():
            if (camps[fingerprint] == most and not tie) or (copies.key, rank) in self._told:
                continue
            self._told.add((copies.key, rank))
            series = copies.series
            found.append(
                Anomaly(
                    step=step,
                    micro_step=series.micro_step,
                    rank=rank,
                    order=0,
                    name=series.name,
                    quantity=series.quantity,
                    statistic="bits",
                    value=float(camps[fingerprint]),
                    expected=float(most),
                    score=SCORE,
                    detector=NAME,
                    kind=REPLICA_MISMATCH,
                    module=series.module,
                    last_clean=self.equal_at[copies.key],
                )
            )
        return found


def explained_by_calls(found: Iterable[Anomaly]) -> list[Anomaly]:
    """Return the anomalies of one step, those of replicas marked as passed on where a collective failed at the step."""
    found = list(found)
    if all(a.kind != COMMUNICATION_MISMATCH for a in found):
        return found
    return [replace(a, passed_on=True) if a.kind == REPLICA_MISMATCH else a for a in found]
