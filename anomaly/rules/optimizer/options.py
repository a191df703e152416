"""An option of the optimizer that is not what its schedule, or its constancy so far, lets expect."""

import math
from collections import deque
from typing import Any, ClassVar, Final

from trainsentry.anomaly.anomaly import OPTION_CHANGE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.optimizer.batch_size import BatchSize
from trainsentry.anomaly.rules.optimizer.rate_schedule import (
    AGAIN,
    JUMP,
    PACE_STEPS,
    PARTED,
    TIMES_USUAL,
    Option,
    OptionFault,
    ResumedFall,
    began_anew,
    follow,
    glitch,
    is_smooth,
    oddness,
    pace,
)
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.scalars.declared_changes import DECLARED, DeclaredChanges
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import NO_OPTION, OPTION, option_name, option_parts
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as the number itself is read and is no estimate."""

SETTLED: Final = 10
"""Steps of an option before it is judged: programs set their options when they begin."""

ABOVE_LARGEST: Final = 1.2
"""A rate jumps too high at so many times the largest rate known: seen, or named by the schedule."""

LEAST_CHANGE: Final = math.log(1.05)
"""Smallest change of an option other than the rate: some schedules change the decay of weights a little each epoch."""

LARGEST_DROP: Final = 30.0
"""A rate may fall by this factor in a step: schedules of steps divide by 2 to 10."""

NEAR_START: Final = 0.05
"""Share by which a rate that falls may differ from the run's first rate and count as a schedule that starts anew."""

NEAR_ZERO: Final = 0.05
"""Share of the largest rate from which a schedule may step to zero: one that takes 20 steps or more ends below it."""

RESTART: Final = 5.0
"""A rate that rises by this factor, and not above its largest, is a warm restart (Loshchilov and Hutter, 2017)."""

PEAKED: Final = 0.8
"""Share of the largest rate to which a rate has fallen when its warm-up is over: one that climbs above all that it was
from there, by small changes, follows no schedule but a factor with the wrong sign."""

TOGETHER: Final = 20
"""Changes through which groups keep their ratio, or steps in which neither changes, before one that parts counts."""

IDLE_FOR: Final = 30
"""Steps with a learning rate of 0 in every group, after others, that are told of: a schedule was made for fewer steps.
The last step of a schedule has it, and a few that wait for a new stage."""

KEPT_RATES: Final = 16
"""Newest rates of a group that another of its numbers may keep: SpeechBrain has the rate before in `prev_lr`."""

RATE: Final = "lr"
KNOWN_RATES: Final = ("initial_lr", "max_lr")
"""Options that schedulers add: a rate up to them is planned."""


class OptionRule(Rule):
    """Judges the options of optimizers, each when it changes, at the step in which it does.

    An option that has not changed must stay as it is. A learning rate follows its schedule: a jump that the run has not
    made before, a rate above every rate known, a sign that turns, a sudden zero, another rate for a single step, a pace
    that doubles, and groups that kept their ratio and part are findings. Drops between constant stretches, restarts and
    warm-ups belong to schedules, and so does a rise with the batch.
    """

    name: ClassVar[str] = "options"
    speaks_for: ClassVar[str | None] = OPTION_CHANGE
    quantities: ClassVar[frozenset[str]] = frozenset({OPTION, *DECLARED})
    statistics: ClassVar[frozenset[str]] = frozenset()
    state_key: ClassVar[str | None] = "options"

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_option = arrays.series.column(bool, of=lambda s: s.scalar and option_parts(s.name) is not None)
        self._options: dict[str, Option] = {}
        self._ids: dict[str, int] = {}
        self._ratios: dict[str, tuple[float, int]] = {}
        self._batch, self._declared = BatchSize(arrays), arrays.shared(DeclaredChanges)
        self._declared_at = -1
        self._changed_at: int | None = None
        self._falls: dict[str, ResumedFall] = {}
        self._rates: dict[str, deque[float]] = {}
        self._groups: dict[tuple[int, int], str] = {}  # with the name of the rate that each has or lacks
        self._first_step, self._idle_is_told = -1, False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the findings of a record's options, and of groups that parted in an earlier step."""
        record = observed.record
        self._batch.note(observed)
        if self._declared.ends_stretch(record):
            self._declared_at = record.step
        found = self._parted(record.step)
        for row in rows_where(self._is_option.values[record.where]).tolist():
            series_id = int(record.ids[row])
            name, value = observed.table.series[series_id].name, float(record.values[row, VALUE])
            self._ids[name] = series_id
            if value == NO_OPTION:
                self._options.pop(name, None)
                self._falls.pop(name, None)
                continue
            fault = self._take(name, value, record.step)
            if fault is not None:
                found.append(self._finding(name, fault))
        if self._falls and not record.skipped:
            found += self._slower(record.step)
        return found + self._idle(record.step)

    def _idle(self, step: int) -> list[Finding]:
        """Judge, once for each stretch, whether all rates have been 0 for long; each group must have one."""
        if step < self._first_step or self._first_step < 0:
            self._first_step = step
        rates = [self._options[name] for name in self._groups.values() if name in self._options]
        is_idle = len(rates) == len(self._groups) and all(option.value == 0 for option in rates)
        if not is_idle or not any(option.largest for option in rates):
            self._idle_is_told = False
            return []
        since = max(option.since for option in rates)
        if self._idle_is_told or step < max(since, self._first_step) + IDLE_FOR:
            return []
        self._idle_is_told = True
        name = next(iter(self._groups.values()))
        fault = OptionFault("idle", 0.0, self._options[name].before, since)
        return [self._finding(name, fault)] if name in self._ids else []

    def _note_group(self, name: str) -> None:
        optimizer, group, _ = option_parts(name) or (0, 0, "")
        self._groups[optimizer, group] = _rate_of(name)

    def _slower(self, step: int) -> list[Finding]:
        """Judge, once, whether rates that fell when they were saved go on falling in the resumed run."""
        faults = {}
        for name, fall in list(self._falls.items()):
            if fall.note(step):
                del self._falls[name]
                faults[name] = fall.slower(self._options[name].value)
        return [self._finding(name, fault) for name, fault in faults.items() if fault and name in self._ids]

    def _take(self, name: str, value: float, step: int) -> OptionFault | None:
        """Follow an option to its new value; return what is wrong with it."""
        known = self._options.get(name)
        if known is None:
            self._options[name] = Option(value, step, step, start=value, largest=abs(value))
            self._note_group(name)
            return None
        if value == known.value:  # a resumed run writes all its options again
            return None
        if _key(name) == RATE:
            self._rates.setdefault(name, deque([known.start], maxlen=KEPT_RATES)).extend((known.value, value))
        settled = step - known.first >= SETTLED
        fault = self._fault(name, known, value, step) if settled else None
        follow(known, value, step, settled=settled, fault=fault)
        if _key(name) == RATE:
            self._changed_at = step
        return fault

    def _fault(self, name: str, known: Option, value: float, step: int) -> OptionFault | None:
        if not math.isfinite(value):
            return OptionFault("value", value, known.value, step)
        if value < 0 <= known.value:
            return OptionFault("sign", value, known.value, step)
        if _key(name) in KNOWN_RATES:
            return None
        if _key(name) != RATE:
            rates = self._rates.get(_rate_of(name), ())
            return None if value in rates and known.value in rates else _constancy(known, value, step)
        anew = began_anew(known, value, step)
        climbed = self._climb(name, known, value, step)
        jumped = glitch(known, value, step) or self._jump(name, known, value, step)
        if jumped is not None:
            known.fell = None  # the fall itself is told
        paced = pace(known, value, step)
        if self._batch.has_more_passes_since(step - PACE_STEPS):  # the rate is set at each micro-step
            paced = None
        return jumped or anew or climbed or paced

    def _planned(self, name: str) -> float:
        """Return the largest rate that a group's own options name, 0 for none."""
        group = name.rpartition(".")[0]
        named = (self._options[f"{group}.{key}"].value for key in KNOWN_RATES if f"{group}.{key}" in self._options)
        return max(named, default=0.0)

    def _climb(self, name: str, known: Option, value: float, step: int) -> OptionFault | None:
        """Judge a rate that climbs by small changes, once its warm-up is over."""
        if value <= known.value or self._batch.explains(known.value, value, step):
            known.top = None
        elif known.top is None and known.value < PEAKED * known.largest:
            known.top = step, known.largest
        if known.top is None or value <= ABOVE_LARGEST * max(known.top[1], self._planned(name)):
            return None
        (began, largest), known.top = known.top, None
        return OptionFault("climb", value, largest, began)

    def _jump(self, name: str, known: Option, value: float, step: int) -> OptionFault | None:
        """Judge the size of a rate's change."""
        largest = max(known.largest, self._planned(name))
        too_large = OptionFault("largest", value, largest, step) if value > ABOVE_LARGEST * largest else None
        odd = OptionFault("value", value, known.value, step)
        if value == 0:
            return odd if known.value > NEAR_ZERO * largest else None
        if known.value <= 0:
            return too_large
        ratio = math.log(value / known.value)
        usual = max(JUMP, TIMES_USUAL * max(known.ratios, default=0.0), AGAIN * known.largest_jump)
        if abs(ratio) <= usual or self._batch.explains(known.value, value, step):
            return None
        smooth = is_smooth(known, step)
        if smooth and abs(value - known.value) <= TIMES_USUAL * max(map(abs, known.changes)):
            return None  # near zero each step is a large part of the rest
        if ratio > 0:
            return too_large or (odd if smooth and ratio < math.log(RESTART) else None)
        starts_anew = smooth and abs(value / known.start - 1) <= NEAR_START if known.start > 0 else False
        return odd if starts_anew or -ratio > math.log(LARGEST_DROP) else None

    def _parted(self, step: int) -> list[Finding]:
        """Judge the ratios of groups after a step in which a rate changed: all its rows have come by now."""
        at = self._changed_at
        if at is None or step <= at:
            return []
        self._changed_at = None
        if at == self._declared_at:  # another stage has rates of its own, as layers that are thawed
            self._ratios.clear()
            return []
        found = []
        for name, option in self._options.items():
            first = f"{'.'.join(name.split('.')[:2])}.0.{RATE}"
            if _key(name) != RATE or name == first or first not in self._options:
                continue
            other = self._options[first]
            if not (option.value > 0 and other.value > 0):
                continue
            ratio = option.value / other.value
            usual, times = self._ratios.get(name) or _ratio_at_start(option, other, at)
            same = abs(ratio / usual - 1) <= PARTED
            self._ratios[name] = (usual, times + 1) if same else (ratio, 0)
            if not same and times >= TOGETHER and name in self._ids and first in self._ids:
                odd = oddness(option, at) > oddness(other, at) or other.since != at
                expected = other.value * usual if odd else option.value / usual
                fault = OptionFault("groups", option.value if odd else other.value, expected, at)
                found.append(self._finding(name if odd else first, fault))
        return found

    def _finding(self, name: str, fault: OptionFault) -> Finding:
        detail = (OPTION_CHANGE, self.name, fault.how, fault.value, fault.expected, SCORE)
        return Finding(
            self._ids[name],
            -1,
            *detail,
            step=fault.step,
            last_clean=fault.step - 1,
            passed_on=False,
            name=words_of(name),
            quantity="optimizer",
        )

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the option with both values, and why it is odd."""
        expected = f"{anomaly.expected:.6g}"
        if anomaly.statistic == "climb":
            climbed = f"the optimizer's {subject} has climbed since step {anomaly.step}, to {anomaly.value:.6g}"
            return f"{climbed}; no rate before was above {expected}"
        if anomaly.statistic == "slower":
            slower = f"the optimizer's {subject} falls more slowly since the run was resumed at step {anomaly.step}"
            return f"{slower}: it is {anomaly.value:.6g}, and at its pace before would be {expected}"
        if anomaly.statistic == "idle":
            since = f"all learning rates of the optimizer are 0 since step {anomaly.step}"
            return f"{since}: the training goes on, and learns nothing"
        now = f"the optimizer's {subject} is {anomaly.value:.6g} at step {anomaly.step}"
        reasons = {
            "largest": f"no rate before was above {expected}",
            "groups": f"its ratio to the other groups, constant until then, gives {expected}",
            "anew": f"before, it was {expected}, and it has risen at each step since: the schedule began anew",
            "pace": f"the schedule has moved at twice its pace since step {anomaly.step - PACE_STEPS + 1}",
            "one_step": f"at this step alone: before and after it is {expected}",
        }
        return f"{now}; {reasons.get(anomaly.statistic, f'before, it was {expected}')}"

    def saved(self, count: int) -> dict[str, list[float]]:
        """Return numbers of each option.

        They are its value, largest, first and last step, largest jump, usual change and first value, then its newest
        changes.
        """
        return {
            name: [
                o.value,
                o.largest,
                o.first,
                o.since,
                o.largest_jump,
                max(o.ratios, default=0.0),
                o.start,
                *o.changes,
            ]
            for name, o in self._options.items()
        }

    def load(self, saved: Any) -> None:
        """Restore the options: a resumed run should go on with them."""
        self._falls = {}
        for name, (value, largest, first, since, jump, usual, start, *changes) in saved.items():
            known = Option(float(value), int(since), int(first), float(start), largest=float(largest))
            known.largest_jump, known.ratios, known.changes = float(jump), [float(usual)], [float(c) for c in changes]
            self._options[name] = known
            self._note_group(name)
            fall = ResumedFall.of(known) if _key(name) == RATE else None
            if fall is not None:
                self._falls[name] = fall


def words_of(name: str) -> str:
    """Return how a sentence names an option.

    >>> words_of("option.0.1.lr"), words_of("option.2.0.betas.1")
    ('lr of group 1', 'betas.1 of group 0 of optimizer 2')
    """
    optimizer, group, key = option_parts(name) or (0, 0, name)
    return f"{key} of group {group}" + (f" of optimizer {optimizer}" if optimizer else "")


def _rate_of(name: str) -> str:
    """Return the name of the rate of an option's group."""
    optimizer, group, _ = option_parts(name) or (0, 0, "")
    return option_name(optimizer, group, RATE)


def _key(name: str) -> str:
    return (option_parts(name) or (0, 0, ""))[2]


def _constancy(known: Option, value: float, step: int) -> OptionFault | None:
    """Judge an option other than the rate: a jump after a constant stretch."""
    if step - known.since < SETTLED and not known.ratios:
        return None
    moves = step == known.since + 1 and known.changes
    if moves and abs(value - known.value) <= TIMES_USUAL * max(map(abs, known.changes)):
        return None  # a schedule, as that of momentum beside a cycle of the rate
    most = max(LEAST_CHANGE, TIMES_USUAL * max(known.ratios, default=0.0), AGAIN * known.largest_jump)
    if _change(known.value, value) <= most:
        return None
    return OptionFault("value", value, known.value, step)


def _change(before: float, after: float) -> float:
    """Return |log ratio|: of two shares near 1, such as betas, that of what they lack if it is larger."""
    if before * after <= 0:
        return math.inf
    change = abs(math.log(after / before))
    if 0 < before < 1 and 0 < after < 1:
        change = max(change, abs(math.log((1 - after) / (1 - before))))
    return change


def _ratio_at_start(option: Option, other: Option, at: int) -> tuple[float, int]:
    """Return the ratio of two rates that were constant until step `at`, and for how many steps; NaN for others.

    A rate that falls alone may have a schedule of its own, so only rises count.
    """
    before = [each.before if each.since == at else each.value for each in (option, other)]
    rises = [each.value > was for each, was in zip((option, other), before, strict=True)]
    if before != [option.start, other.start] or min(before) <= 0 or not any(rises):
        return math.nan, 0
    return before[0] / before[1], at - max(option.first, other.first)
