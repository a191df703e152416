"""Numbers that ranks have in common, as a reduced loss, a norm of all gradients or a rate, stay in common."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import REPLICA_MISMATCH, Anomaly, Detector
from trainsentry.anomaly.rules.scalars.loss_above_start import LOSS
from trainsentry.collectors.series import (
    LEARNING_RATE,
    REPEATED_RANDOM,
    REPEATED_SAMPLES,
    Series,
    option_parts,
)

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, and below the rules that compare the tensors themselves."""

LEARNED: Final = 20
"""Different values that ranks must have shared, each equal to the bit, before a number counts as one of theirs."""

APART: Final = 1e-3
"""Least difference, as a share of the larger number: other orders of additions make less."""

MOST_NAMES: Final = 16
"""Numbers of a run that are compared beside the loss and the rate, the first that come: they go over the network at
every step."""

ALWAYS: Final = frozenset({LOSS, LEARNING_RATE})

DIGITS: Final = 6
"""Digits of a number that is rounded, or a count: minutes, a share of memory, or thousands of samples are equal on all
ranks until one is past a boundary. The loss and norms have more, in float32 too."""

BEFORE_GRADIENTS: Final = -1
LAST_IN_STEP: Final = 2**31 - 1
"""The execution order of these anomalies: gradients come of the loss, and other numbers of the tensors of the step."""

TIE: Final = "tie"
"""The statistic of these anomalies where no value is that of most ranks."""

Camps = Mapping[str, list[tuple[float, list[int]]]]
"""By name: each value of a step, with the ranks that have it."""


def is_common(series: Series) -> bool:
    """Whether ranks may have a scalar in common: one of the whole training, no option, as these have few rows."""
    of_tensors = series.name.partition(".")[0] in {REPEATED_SAMPLES, REPEATED_RANDOM}
    return series.scalar and not series.module and not of_tensors and option_parts(series.name) is None


class CommonSeries:
    """Chooses the numbers of one rank that are compared."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def takes(self, series: Series) -> bool:
        """Whether a series of the rank's table, each asked for once and in order, is compared."""
        if not is_common(series):
            return False
        if series.name not in ALWAYS and len(self._names) < MOST_NAMES:
            self._names.add(series.name)
        return series.name in self._names or series.name in ALWAYS


@dataclass(slots=True)
class _Bond:
    """What a rank has in common with another, `first`: the value of the last step, and how many others before it."""

    first: int
    value: float
    values: int
    step: int


@dataclass(frozen=True)
class _Parted:
    """A rank whose number is not that of most with which it had it in common, or that is in a tie with them.

    `alike` is the last step at which all had the same.
    """

    rank: int
    value: float
    others: float
    alike: int
    is_tie: bool


@dataclass
class _Number:
    """Which ranks have a number in common: each is compared with the first one to which it was always equal."""

    bonds: dict[int, _Bond] = field(default_factory=dict)
    unlike: int = 0

    @property
    def is_of_each(self) -> bool:
        """Whether each rank has a number of its own from the start, as the loss of its own batch."""
        return self.unlike >= LEARNED

    def judge(self, step: int, values: Mapping[int, float]) -> list[_Parted]:
        """Take in the values of a step by rank; return the odd ones among ranks that part."""
        if not self.is_of_each:
            self.unlike = self.unlike + 1 if len(set(values.values())) == len(values) > 1 else 0
        groups: dict[int, set[int]] = {}
        alike: dict[int, int] = {}  # by first rank of those that part, the last step of all
        for rank, value in values.items():
            bond = self.bonds.get(rank)
            if bond is None or bond.first not in values:
                self._bind(rank, values, step)
                continue
            known = bond.values >= LEARNED
            if known:
                groups.setdefault(bond.first, {bond.first}).add(rank)
            if value == values[bond.first]:
                self.bonds[rank] = _Bond(bond.first, value, bond.values + (value != bond.value), step)
                continue
            self._bind(rank, values, step)
            if known and _are_apart(value, values[bond.first]):
                last = min(bond.step, step - 1)  # the run may have gone back
                alike[bond.first] = min(last, alike.get(bond.first, last))
        return [odd for first, last in alike.items() for odd in _odd_ones({r: values[r] for r in groups[first]}, last)]

    def _bind(self, rank: int, values: Mapping[int, float], step: int) -> None:
        """Compare a rank from now on with the first one that has the same value."""
        value = values[rank]
        self.bonds[rank] = _Bond(min(r for r in values if values[r] == value), value, 1, step)


def _are_apart(one: float, other: float) -> bool:
    return abs(one - other) > APART * max(abs(one), abs(other))


def _odd_ones(values: Mapping[int, float], alike: int) -> Iterator[_Parted]:
    """Yield the ranks with another value than most; in a tie only one."""
    camps = Counter(values[rank] for rank in sorted(values))
    [(usual, most)] = camps.most_common(1)
    is_tie = sum(count == most for count in camps.values()) > 1
    odd = [rank for rank in sorted(values) if _are_apart(values[rank], usual)]
    for rank in odd[:1] if is_tie else odd:
        yield _Parted(rank, values[rank], usual, alike, is_tie)


class CommonNumbersRule(Detector):
    """Learns which ranks have a number in common, and names those whose number parts from it.

    A reduced loss, the norm of all gradients and a rate are equal on all ranks; the ranks of tensor parallelism have a
    loss in common. One that parts was computed from other data, or from a part of them: a norm of a rank's own shards,
    a loss that is reduced no more. Numbers of few digits are left out: ranks may count their own samples, which are
    equal until a batch is shorter. Where several recorders compare, each leaves out what all its ranks have for
    themselves.
    """

    name: ClassVar[str] = "common_numbers"
    compares_ranks: ClassVar[bool] = True

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, dict[str, float]]] = {}
        self._numbers: dict[str, _Number] = {}

    def take(self, step: int, rank: int, name: str, value: float) -> None:
        """Take one rank's number of a step."""
        if not math.isfinite(value) or value == float(f"{value:.{DIGITS}g}"):
            return
        if name not in self._numbers:
            if len(self._numbers.keys() - ALWAYS) == MOST_NAMES and name not in ALWAYS:
                return
            self._numbers[name] = _Number()
        self._steps.setdefault(step, {}).setdefault(rank, {})[name] = value

    def take_part(self, step: int, part: Camps) -> None:
        """Take the numbers of a step from the ranks that report to another recorder, as its `left` made them."""
        for name, camps in part.items():
            for value, ranks in camps:
                for rank in ranks:
                    self.take(step, rank, name, float(value))

    def go_back(self, step: int, rank: int) -> None:
        """Forget the numbers of one rank for steps from `step` on."""
        for ranks in [ranks for s, ranks in self._steps.items() if s >= step]:
            ranks.pop(rank, None)

    def left(self, step: int) -> dict[str, list[tuple[float, list[int]]]]:
        """Return the numbers of a step for the recorder that compares all ranks, and forget them."""
        found: dict[str, list[tuple[float, list[int]]]] = {}
        for name, values in self._values_of(step).items():
            number = self._numbers[name]
            number.judge(step, values)
            if not number.is_of_each:
                camps: dict[float, list[int]] = {}
                for rank, value in values.items():
                    camps.setdefault(value, []).append(rank)
                found[name] = list(camps.items())
        return found

    def judge(self, step: int) -> list[Anomaly]:
        """Return an anomaly for each rank whose number parts from the one that it had in common with others."""
        return [
            _anomaly(step, name, parted)
            for name, values in self._values_of(step).items()
            for parted in self._numbers[name].judge(step, values)
        ]

    def _values_of(self, step: int) -> dict[str, dict[int, float]]:
        """Return the values of a step by name and rank, and forget it and the steps before."""
        ranks = self._steps.get(step, {})
        self._steps = {s: by_rank for s, by_rank in self._steps.items() if s > step}
        by_name: dict[str, dict[int, float]] = {}
        for rank in sorted(ranks):
            for name, value in ranks[rank].items():
                by_name.setdefault(name, {})[rank] = value
        return by_name

    @staticmethod
    def sentence(anomaly: Anomaly, _subject: str) -> str:
        """Return both numbers, and whether it is known which is right."""
        others, tie = "the other ranks", ""
        if anomaly.statistic == TIE:
            others, tie = "another", ", a tie: it is unknown which rank is right"
        return (
            f"{anomaly.name} is {anomaly.value:.6g} on rank {anomaly.rank} and {anomaly.expected:.6g} on {others} at "
            f"step {anomaly.step}{tie}; up to step {anomaly.last_clean} these ranks had the same number to the bit"
        )


def _anomaly(step: int, name: str, parted: _Parted) -> Anomaly:
    return Anomaly(
        step=step,
        micro_step=0,
        rank=parted.rank,
        order=BEFORE_GRADIENTS if name == LOSS else LAST_IN_STEP,
        name=name,
        quantity=name,
        statistic=TIE if parted.is_tie else "value",
        value=parted.value,
        expected=parted.others,
        score=SCORE,
        detector=CommonNumbersRule.name,
        kind=REPLICA_MISMATCH,
        last_clean=parted.alike,
    )
