"""Replicas that differ: tensors that several ranks hold a copy of must be equal to the bit."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import COMMUNICATION_MISMATCH, REPLICA_MISMATCH, Anomaly, Detector
from trainsentry.collectors.series import BUFFER, PARAMETER, Series

SCORE: Final = 100.0
"""Deviations: a rule whose bound holds for any run, as equal computations of equal numbers give equal bits."""

BITS: Final = "bits"
"""The statistic of these anomalies; of a tie that was settled, the name of the detector that settled it."""

EQUAL_VALUES: Final = 2
"""Different values that copies must have shared before they count as replicas: equal seeds make one, and zeros, ones
and frozen tensors keep theirs."""

EQUAL_BUFFERS: Final = 10
"""The same of buffers, which may hold a few numbers that ranks share by chance, such as counts and flags."""


@dataclass(frozen=True)
class ReplicasOfStep:
    """One part of a tensor at one step, with the fingerprint that each rank has of it.

    One rank may stand for its whole host where all copies there are equal; it counts once.
    """

    key: int
    series: Series
    prints: Mapping[int, float | int]


@dataclass
class ReplicaRule(Detector):
    """Names the ranks whose copy differs from that of most others, once for each copy.

    Only copies that were equal before count as replicas: ranks of a pipeline, or with experts of their own, may have
    different tensors of one name, which differ from the start; and equal seeds make equal weights that each rank then
    trains by itself. So it takes `EQUAL_VALUES` different values. `stranger_names` holds the names of weights that are
    different tensors, with their model chunk; `strangers` the keys of other tensors that were never equal, and of
    buffers that once were not.

    With two ranks, or two camps of one size, it is unknown which is right: then both sides are named, and `value`
    equals `expected`. These are the numbers of ranks that agree with this one, and with the largest camp.
    """

    name: ClassVar[str] = "replicas"
    speaks_for: ClassVar[str | None] = REPLICA_MISMATCH
    compares_ranks: ClassVar[bool] = True
    leaves_ties: ClassVar[bool] = True

    equal_at: dict[int, int] = field(default_factory=dict)
    stranger_names: set[tuple[str, int]] = field(default_factory=set)
    strangers: set[int] = field(default_factory=set)
    _values: dict[int, set[int]] = field(default_factory=dict)
    _reported: set[tuple[int, int]] = field(default_factory=set)

    def judge(self, step: int, unequal: Iterable[ReplicasOfStep], equal: Mapping[int, int]) -> list[Anomaly]:
        """Return an anomaly for each rank whose copy differs from the others.

        `equal` maps the keys of copies that are equal at this step to their fingerprint.
        """
        for key, fingerprint in equal.items():
            values = self._values.setdefault(key, set())
            if len(values) < EQUAL_BUFFERS:
                values.add(fingerprint)
            self.equal_at[key] = step
        found = []
        for copies in unequal:
            if self.are_replicas(copies):
                found += self._differing(step, copies)
            elif copies.series.quantity == PARAMETER:
                self.stranger_names.add((copies.series.name, copies.series.vpp_stage))
            elif copies.key not in self.equal_at or copies.series.quantity == BUFFER:
                self.strangers.add(copies.key)
        return found

    def vouch(self, key: int, step: int) -> None:
        """Count copies as replicas: another recorder saw them equal while they changed, last at `step`."""
        self._values[key] = set(range(EQUAL_BUFFERS))
        self.equal_at[key] = max(step, self.equal_at.get(key, step))

    def are_replicas(self, copies: ReplicasOfStep) -> bool:
        """Whether copies have been equal before, while they changed."""
        name = (copies.series.name, copies.series.vpp_stage)
        is_buffer = copies.series.quantity == BUFFER
        enough = EQUAL_BUFFERS if is_buffer else EQUAL_VALUES
        is_stranger = name in self.stranger_names or (is_buffer and copies.key in self.strangers)
        return len(self._values.get(copies.key, ())) >= enough and not is_stranger

    def _differing(self, step: int, copies: ReplicasOfStep) -> list[Anomaly]:
        camps = Counter(copies.prints.values())
        most = max(camps.values())
        tie = sum(count == most for count in camps.values()) > 1
        found = []
        for rank, fingerprint in copies.prints.items():
            if (camps[fingerprint] == most and not tie) or (copies.key, rank) in self._reported:
                continue
            self._reported.add((copies.key, rank))
            series = copies.series
            found.append(
                Anomaly(
                    step=step,
                    micro_step=series.micro_step,
                    rank=rank,
                    order=0,
                    name=series.name,
                    quantity=series.quantity,
                    statistic=BITS,
                    value=float(camps[fingerprint]),
                    expected=float(most),
                    score=SCORE,
                    detector=self.name,
                    kind=REPLICA_MISMATCH,
                    module=series.module,
                    last_clean=self.equal_at[copies.key],
                )
            )
        return found

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return on which rank the copy differs, and how many other ranks agree with each other."""
        equal = f"; all ranks were equal at step {anomaly.last_clean}"
        if anomaly.statistic != BITS:
            return (
                f"{subject} differs between ranks at step {anomaly.step}, and was modified outside the optimizer "
                f"update on rank {anomaly.rank}{equal}"
            )
        if anomaly.value == anomaly.expected:
            ranks = "1 rank has" if anomaly.value == 1 else f"{anomaly.value:.0f} ranks have"
            return (
                f"{subject} differs bitwise between ranks at step {anomaly.step}: {ranks} the bits of rank "
                f"{anomaly.rank}, and as many have others, a tie: it is unknown which rank is right{equal}"
            )
        agree = f"{anomaly.expected:.0f} other ranks agree with each other"
        return f"{subject} differs bitwise on rank {anomaly.rank} at step {anomaly.step}; {agree}{equal}"


def explained_by_calls(found: Iterable[Anomaly]) -> list[Anomaly]:
    """Return the anomalies of one step; where a collective failed at it, differing replicas are marked as passed on."""
    found = list(found)
    if all(a.kind != COMMUNICATION_MISMATCH for a in found):
        return found
    return [replace(a, passed_on=True) if a.kind == REPLICA_MISMATCH else a for a in found]
