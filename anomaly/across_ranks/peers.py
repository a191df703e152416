"""Ranks that do the same work are alike and call the same collectives in the same order; the odd one is named."""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeGuard

from trainsentry.anomaly.anomaly import COMMUNICATION_MISMATCH, DUPLICATE_DATA, SPIKE, STRAGGLER, Anomaly, Detector
from trainsentry.collectors.series import COMMUNICATION_INPUT, GRADIENT_UNREDUCED, OUTSIDE_SECONDS, STEP_SECONDS

ORDER_SCORE: Final = 100.0
"""Deviations: a rule whose bound holds for any run, as ranks that call other collectives hang or mix up their data."""

ALIKE_FOR: Final = 16
"""Steps in a row in which all ranks must have called the same before a difference counts: some programs give their
ranks different work from the start."""

LAST_IN_STEP: Final = 2**31 - 1
"""The execution order of these anomalies: an anomaly of a single call says more and comes first."""


class CallOrderRule(Detector):
    """Compares the collectives that each rank calls in a step, by one number; names the minority, or all in a tie.

    The number is known at every step, sampled or not, so that a single deviation of a rank is found.
    """

    name: ClassVar[str] = "call_orders"
    compares_ranks: ClassVar[bool] = True

    def __init__(self) -> None:
        self._alike = 0

    def judge(self, step: int, numbers: Mapping[int, float]) -> list[Anomaly]:
        """Return an anomaly for each rank that called other collectives, or in another order."""
        if len(numbers) < 2:
            return []
        camps = Counter(numbers.values())
        alike, self._alike = self._alike, self._alike + 1 if len(camps) == 1 else 0
        if len(camps) == 1 or alike < ALIKE_FOR:
            return []
        most = max(camps.values())
        tie = sum(count == most for count in camps.values()) > 1
        off = [rank for rank, number in sorted(numbers.items()) if tie or camps[number] < most]
        return [_other_order(step, rank, camps[numbers[rank]], most) for rank in off]

    @staticmethod
    def sentence(anomaly: Anomaly, _subject: str) -> str:
        """Return which rank deviates, and how many ranks call the same as it does."""
        alike = f"{anomaly.value:.0f} {'rank calls' if anomaly.value == 1 else 'ranks call'} the same as it does"
        tie = ", as many as the others" if anomaly.value == anomaly.expected else ""
        return (
            f"rank {anomaly.rank} called other collectives than other ranks in step {anomaly.step}, or in another "
            f"order ({alike}{tie})"
        )


def _other_order(step: int, rank: int, own: int, most: int) -> Anomaly:
    return Anomaly(
        step=step,
        micro_step=0,
        rank=rank,
        order=LAST_IN_STEP,
        name="all",
        quantity=COMMUNICATION_INPUT,
        statistic="order",
        value=float(own),
        expected=float(most),
        score=ORDER_SCORE,
        detector=CallOrderRule.name,
        kind=COMMUNICATION_MISMATCH,
        last_clean=step - 1,
    )


PEER_SCORE: Final = 20.0
"""Deviations: below the rules whose bounds hold for any run, as peers are alike by their work only."""

SLOWER: Final = 1.25
"""A straggler's work takes this multiple of the others'; below it, a rank with a fuller machine is found every day."""

WAITED: Final = 0.05
"""Share of a step that the others must wait, so that being slow costs something."""

LEAST_SECONDS: Final = 0.01
"""Seconds a step by which a straggler's work must be longer: an operating system takes away less now and then."""

OUTSIDE: Final = 0.1
"""Share of its step that a rank must spend more than the others before its first pass, in which they wait for it."""

WINDOW: Final = 20
LASTING: Final = 16
START_UP: Final = 20
"""A straggler is slow in 16 of 20 samples: a checkpoint, a full disk, a busy neighbour pass. The first 20 samples, in
which everything starts, do not count."""

PEER_RATIO: Final = 5.0
"""Factor between a rank's loss, or the norm of its own gradients, and the median of the others, `PEER_LASTING` samples
in a row."""

PEER_LASTING: Final = 10
"""Samples of an outlying rank. With losses of small batches (lognormal, σ = 0.8) one sample is so far out in 4 of 100
cases, and ten in a row in 1 of 10^14."""

PEER_ALIKE: Final = 20
"""Samples in which a rank must have been alike before: one that has harder data from the start is not at fault."""

TAKES_BACK: Final = 3
"""Samples in time that a late one takes back before a rank counts as one that used to be in time: one that logs or
evaluates at each fifth step does, a stage that is late at every second step once in some 200,000 chances."""

DUPLICATES: Final = 3
DUPLICATES_WITHIN: Final = 10
"""Different batches that two ranks must share within ten samples: one may be chance."""


FEWEST: Final = 3
"""Ranks among which one can be told from the others."""


class MedianOfOthers:
    """The median of all numbers but one, for each of many; NaN where there is no other.

    Of two in the middle it is the nearer one: an outlier among three ranks must not make the other two look odd.

    >>> MedianOfOthers([1.0, 5.0, 2.0]).without(5.0)
    2.0
    """

    def __init__(self, numbers: Iterable[float]) -> None:
        self._sorted = sorted(numbers)

    def without(self, own: float) -> float:
        """Return the median of all but one that is equal to `own`, which must be among them."""
        left = len(self._sorted) - 1
        if left < 1:
            return math.nan
        at = bisect_left(self._sorted, own)
        middle = {(left - 1) // 2, left // 2}
        return min((self._sorted[i + (i >= at)] for i in middle), key=lambda number: abs(number - own))


@dataclass
class RankReport:
    """One rank's numbers of one step; None where it reported none.

    `order` stands for the collectives that it called; `data` is a fingerprint of its model's inputs; `gradient`
    the square of the norm of its own gradients, as far as they were read before their reduction; `outside` the seconds
    between the end of the step before and its first pass.
    """

    loss: float | None = None
    gradient: float | None = None
    seconds: float | None = None
    waited: float | None = None
    data: float | None = None
    order: float | None = None
    outside: float | None = None


def _known(number: float | None) -> TypeGuard[float]:
    """Whether there is a finite number: a NaN among numbers that are sorted hides the others."""
    return number is not None and math.isfinite(number)


@dataclass
class PeerRule(Detector):
    """Compares the reports of ranks; each finding is reported once, until it ends."""

    name: ClassVar[str] = "peers"
    speaks_for: ClassVar[str | None] = STRAGGLER
    compares_ranks: ClassVar[bool] = True

    _slow: dict[tuple[str, int], deque[bool]] = field(default_factory=dict)
    _odd: Counter[tuple[str, int]] = field(default_factory=Counter)
    _alike: Counter[tuple[str, int]] = field(default_factory=Counter)
    _samples: int = 0
    _batches: dict[tuple[int, int], dict[float, int]] = field(default_factory=dict)
    _reported: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    _orders: CallOrderRule = field(default_factory=CallOrderRule)

    def judge(self, step: int, reports: Mapping[int, RankReport], data_parallel: frozenset[int]) -> list[Anomaly]:
        """Return the anomalies of a step; only ranks of `data_parallel` have data of their own."""
        losses = {r: t.loss for r, t in reports.items() if t.loss is not None}
        own = {r: math.sqrt(t.gradient) for r, t in reports.items() if t.gradient is not None and r in data_parallel}
        return [
            *self._orders.judge(step, {r: t.order for r, t in reports.items() if _known(t.order)}),
            *self._stragglers(step, reports),
            *self._late(step, reports),
            *self._outlying(step, losses, "loss", "loss"),
            *self._outlying(step, own, "own gradients", GRADIENT_UNREDUCED),
            *self._duplicates(step, {r: t for r, t in reports.items() if r in data_parallel}),
        ]

    def _stragglers(self, step: int, reports: Mapping[int, RankReport]) -> list[Anomaly]:
        known = {r: t for r, t in reports.items() if _known(t.seconds) and _known(t.waited)}
        work = {r: max((t.seconds or 0.0) - (t.waited or 0.0), 0.0) for r, t in known.items()}
        waited = {r: (t.waited or 0.0) / (t.seconds or 1.0) for r, t in known.items()}
        others, waits = MedianOfOthers(work.values()), MedianOfOthers(waited.values())
        found = []
        for rank, own in work.items():
            usual = others.without(own)
            slower = own > SLOWER * usual and own - usual > LEAST_SECONDS
            slow = len(work) > 1 and slower and waits.without(waited[rank]) > WAITED
            if self._lasts("slow", rank, slow):
                found.append(_anomaly(step, rank, "training", STEP_SECONDS, STRAGGLER, (own, usual)))
        return found

    def _late(self, step: int, reports: Mapping[int, RankReport]) -> list[Anomaly]:
        """Return the ranks that begin their passes later than the others: these wait in the first collective."""
        known = {r: t for r, t in reports.items() if _known(t.seconds) and _known(t.outside)}
        others = MedianOfOthers(t.outside or 0.0 for t in known.values())
        found = []
        for rank, report in known.items():
            own = report.outside or 0.0
            usual = others.without(own)
            late = len(known) > 1 and own - usual > max(OUTSIDE * (report.seconds or 0.0), LEAST_SECONDS)
            key = ("late", rank)
            # The stages of a pipeline begin one after the other from the start, and by chance not so late now and then.
            if self._alike[key] < PEER_ALIKE:
                self._alike[key] = max(self._alike[key] + (-TAKES_BACK if late else 1), 0)
            if self._lasts("late", rank, late and self._alike[key] >= PEER_ALIKE):
                found.append(_anomaly(step, rank, "training", OUTSIDE_SECONDS, STRAGGLER, (own, usual)))
        return found

    def _lasts(self, what: str, rank: int, holds: bool) -> bool:
        """Whether something that holds of a rank in this sample has come to last."""
        window = self._slow.setdefault((what, rank), deque(maxlen=WINDOW))
        window.append(holds and self._samples > START_UP)
        return self._is_new(what, rank, len(window) == WINDOW and sum(window) >= LASTING)

    def _is_new(self, what: str, rank: int, holds: bool) -> bool:
        """Whether something holds of a rank that did not before."""
        known = (what, (rank,)) in self._reported
        if holds and not known:
            self._reported.add((what, (rank,)))
        elif not holds:
            self._reported.discard((what, (rank,)))
        return holds and not known

    def _outlying(self, step: int, values: Mapping[int, float], name: str, quantity: str) -> list[Anomaly]:
        known = {r: value for r, value in values.items() if math.isfinite(value) and value > 0}
        found: list[Anomaly] = []
        if len(known) < FEWEST:
            return found
        others = MedianOfOthers(known.values())
        for rank, own in known.items():
            usual = others.without(own)
            odd = abs(math.log(own / usual)) > math.log(PEER_RATIO)
            key = (name, rank)
            self._odd[key] = self._odd[key] + 1 if odd else 0
            self._alike[key] += not odd
            if self._odd[key] == PEER_LASTING and self._alike[key] >= PEER_ALIKE:
                found.append(_anomaly(step, rank, name, quantity, SPIKE, (own, usual)))
        return found

    def _duplicates(self, step: int, reports: Mapping[int, RankReport]) -> list[Anomaly]:
        self._samples += 1
        ranks: dict[float, list[int]] = {}
        for rank, t in sorted(reports.items()):
            if t.data is not None and math.isfinite(t.data):
                ranks.setdefault(t.data, []).append(rank)
        found = []
        for fingerprint, same in ranks.items():
            for rank in same[1:]:
                pair = (same[0], rank)
                seen = self._batches.get(pair, {})
                recent = {f: n for f, n in seen.items() if n > self._samples - DUPLICATES_WITHIN}
                batches = self._batches[pair] = {**recent, fingerprint: self._samples}
                if len(batches) >= DUPLICATES and ("data", pair) not in self._reported:
                    self._reported.add(("data", pair))
                    found.append(_anomaly(step, rank, "input.0", "data", DUPLICATE_DATA, (float(same[0]), math.nan)))
        return found

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return how far the rank is from its peers, or whose data it has."""
        if anomaly.kind == DUPLICATE_DATA:
            return (
                f"rank {anomaly.rank} trains on the same data as rank {anomaly.value:.0f}, up to step {anomaly.step}: "
                "their inputs are equal to the bit, batch after batch"
            )
        if anomaly.statistic == OUTSIDE_SECONDS:
            return (
                f"rank {anomaly.rank} is slow: it spends {anomaly.value:.3g} s before its first pass at step "
                f"{anomaly.step} (loading data, logging, evaluating), the other ranks {anomaly.expected:.3g} s, and "
                "these wait for it"
            )
        if anomaly.kind == STRAGGLER:
            return (
                f"rank {anomaly.rank} is slow: its own work takes {anomaly.value:.3g} s a step at step {anomaly.step}, "
                f"{anomaly.value / max(anomaly.expected, 1e-9):.3g} times that of the other ranks, which wait for it"
            )
        times = f"{anomaly.value / anomaly.expected:.3g} times" if anomaly.expected > 0 else "unlike"
        subject = "the norm of the unreduced gradients" if anomaly.quantity == GRADIENT_UNREDUCED else subject
        return (
            f"{subject} of rank {anomaly.rank} is {anomaly.value:.3g} at step {anomaly.step}, {times} the median of "
            f"the other ranks, {anomaly.expected:.3g}"
        )


def _anomaly(step: int, rank: int, name: str, quantity: str, kind: str, values: tuple[float, float]) -> Anomaly:
    return Anomaly(
        step=step,
        micro_step=0,
        rank=rank,
        order=0,
        name=name,
        quantity="training" if kind == STRAGGLER else quantity,
        statistic=quantity,
        value=values[0],
        expected=values[1],
        score=PEER_SCORE,
        detector=PeerRule.name,
        kind=kind,
    )
