"""What is known of one option of an optimizer, and judgements on how a learning rate moves."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

SMOOTH: Final = 8
"""Changes in a row, one at each step, that make a smooth schedule, whose pace is known."""

JUMP: Final = math.log(1.2)
"""A change by this factor can be a jump: schedules that change at each step change by less, but near their end."""

TIMES_USUAL: Final = 3.0
"""A jump exceeds the usual change of this run by so many times: a cosine's last steps grow 1.7 times from one to the
next."""

AGAIN: Final = 1.5
"""A jump so many times as large as the largest that the run has made is another one."""

FALLEN: Final = 3.0
CLIMBS: Final = 5
"""Factor by which a smooth schedule falls in one step, and rises in a row after it, where it began its warm-up anew: a
schedule whose state was not restored. Schedules that fall so go on falling, or rest."""

DOUBLE: Final = (1.7, 2.3)
"""Range of the factor of a pace that has doubled, as when a schedule is stepped twice a step."""

PACE_STEPS: Final = 3
"""Steps in a row at double pace."""

STEADY: Final = 0.2
"""Share by which the pace of a smooth schedule may differ from one step to the next."""

SLOWER: Final = 0.25
"""Share of its pace from which a smooth fall goes on after a resume: a cosine that begins anew moves by a hundredth, a
constant rate not at all."""

PARTED: Final = 0.01
"""Share by which a ratio of two groups must change."""


@dataclass(frozen=True, slots=True)
class OptionFault:
    """How an option is wrong, its value and the one expected, and the step."""

    how: str
    value: float
    expected: float
    step: int


@dataclass(slots=True)
class Option:
    """What is known of one option: its newest value, and the changes that led there.

    `since` and `first` are the steps of its newest and of its first value, which is `start`; `before` is the value
    before the newest one. `changes` are the newest changes at consecutive steps, `ratios` the newest |log ratio| of
    changes that are no jumps, `largest_jump` the largest of those that are. `doubled` counts the steps at twice `pace`.
    `fell` is the step of such a fall, with the values after it and before, and `climbs` counts the rises since. `top`
    is the step of the first rise of a climb after the warm-up, with the largest value before it.
    """

    value: float
    since: int
    first: int
    start: float = 0.0
    before: float = math.nan
    largest: float = 0.0
    largest_jump: float = 0.0
    changes: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    doubled: int = 0
    pace: float = 0.0
    fell: tuple[int, float, float] | None = None
    climbs: int = 0
    top: tuple[int, float] | None = None


def follow(known: Option, value: float, step: int, *, settled: bool, fault: OptionFault | None) -> None:
    """Make `value` the newest one; learn from changes that are no fault."""
    ratio = abs(math.log(abs(value / known.value))) if value * known.value else math.inf
    if ratio < math.inf and (fault is not None or ratio > JUMP) and settled:
        known.largest_jump = max(known.largest_jump, ratio)
    elif ratio < math.inf and fault is None:
        known.ratios = [*known.ratios[1 - SMOOTH :], ratio]
    in_a_row = step == known.since + 1 and fault is None
    known.changes = [*known.changes[-SMOOTH:], value - known.value] if in_a_row else []
    if fault is None:
        known.largest = max(known.largest, abs(value))
    known.before, known.value, known.since = known.value, value, step


def glitch(known: Option, value: float, step: int) -> OptionFault | None:
    """Judge a rate that was another for one step alone."""
    if step != known.since + 1 or not (value > 0 and known.value > 0 and known.before > 0):
        return None
    usual = max(known.ratios, default=0.0)
    away, back = abs(math.log(known.value / known.before)), abs(math.log(value / known.before))
    if away <= max(JUMP, TIMES_USUAL * usual) or back > TIMES_USUAL * usual + PARTED:
        return None
    return OptionFault("one_step", known.value, known.before, known.since)


def pace(known: Option, value: float, step: int) -> OptionFault | None:
    """Judge the pace of a smooth schedule: doubled for some steps in a row is a schedule that is stepped twice."""
    change = value - known.value
    if known.doubled:
        held = step == known.since + 1 and DOUBLE[0] <= change / known.pace <= DOUBLE[1]
        known.doubled = known.doubled + 1 if held else 0
        if known.doubled < PACE_STEPS:
            return None
        known.doubled = 0
        return OptionFault("pace", value, known.value + known.pace, step)
    if is_smooth(known, step) and _is_steady(known.changes) and DOUBLE[0] <= change / known.changes[-1] <= DOUBLE[1]:
        known.doubled, known.pace = 1, known.changes[-1]
    return None


def began_anew(known: Option, value: float, step: int) -> OptionFault | None:
    """Judge a smooth rate that fell at once, further than it ever jumped, and has risen at each step since."""
    if known.fell is not None and step == known.since + 1 and value > known.value:
        known.climbs += 1
        at, low, before = known.fell
        if known.climbs < CLIMBS:
            return None
        known.fell = None
        return OptionFault("anew", low, before, at)
    falls = is_smooth(known, step) and 0 < value * FALLEN < known.value
    falls = falls and math.log(known.value / value) > AGAIN * known.largest_jump
    known.fell, known.climbs = ((step, value, known.value) if falls else None), 0
    return None


@dataclass(slots=True)
class ResumedFall:
    """A rate that fell smoothly when it was saved: its value, its last change with its step, and the steps since.

    A rise may end with the checkpoint, as warm-ups do at round steps; a fall goes on. One that had ended before, at a
    least rate, has no change in the last step.
    """

    value: float
    change: float
    since: int
    first: int = -1
    newest: int = -1
    steps: int = 0

    @classmethod
    def of(cls, known: Option) -> "ResumedFall | None":
        """Return the fall of an option that was restored; None where it did not fall smoothly."""
        falls = len(known.changes) >= SMOOTH and known.changes[-1] < 0 and _is_steady(known.changes)
        return cls(known.value, known.changes[-1], known.since) if falls else None

    def note(self, step: int) -> bool:
        """Count a step; return whether there were enough to judge the pace."""
        if step != self.newest:
            self.first = step if self.first < 0 else self.first
            self.newest, self.steps = step, self.steps + 1
        return self.steps > SMOOTH

    def slower(self, value: float) -> OptionFault | None:
        """Judge the rate that the run has come to."""
        expected = self.value + self.steps * self.change
        share = (value - self.value) / (expected - self.value)
        fell = self.first == self.since + 1 and 0 <= share < SLOWER
        return OptionFault("slower", value, expected, self.first) if fell else None


def is_smooth(known: Option, step: int) -> bool:
    """Return whether an option that changes at `step` has changed at each of the steps before."""
    return step == known.since + 1 and len(known.changes) >= SMOOTH


def _is_steady(changes: list[float]) -> bool:
    return all(a and abs(b / a - 1) <= STEADY for a, b in itertools.pairwise(changes))


def oddness(option: Option, step: int) -> float:
    """Return how far an option's change at a step is from its usual ones; 0 where it did not change there."""
    if option.since != step or not (option.before > 0 and option.value > 0):
        return 0.0
    change = abs(math.log(option.value / option.before))
    usual = float(np.median(option.ratios)) if option.ratios else 0.0
    return abs(change - usual)
