"""A logged number that stands still or turns its sign, a part of the loss that has outgrown its past, a lost reward."""

import re
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, STALE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.scalars.declared_changes import DECLARED, DeclaredChanges
from trainsentry.anomaly.rules.scalars.loss_above_start import LOSS
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import (
    EULER_GAP,
    RECOMPUTED,
    RECOMPUTED_GRADIENT,
    WRITTEN_LARGEST,
    WRITTEN_NORM,
    Series,
)
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as both bounds leave what is random far behind."""

REMEMBERED: Final = 64
"""Newest values of a number that are kept."""

MOVED: Final = 32
TURNS: Final = 8
"""Values in a row, each other than the one before, and turns among them, that make a number random: schedules and
counts go one way, and shares of small batches repeat."""

REPEATS: Final = 6
"""Times in a row that a random number must be the very one before: full float32 numbers repeat once in 10^7."""

ROUNDING: Final = 1e-4
"""Least size of the middle one of the newest moves, as a share of the number: a loss that has converged flips its last
bits for a while."""

BOUNDS: Final = frozenset({1.0, 100.0})
"""Values at which shares end, as an accuracy that is perfect."""

BEYOND: Final = 3.0
LASTS: Final = 4
"""Factor by which a part of the loss must be above the largest of the values before, at so many values in a row: parts
are weighted anew on purpose by less, and spikes pass."""

SIGN: Final = 0.4
AROUND: Final = 8
"""Least size of a number that has turned its sign, and of the newest values before, as a share of the median of all
before: one that glides through zero, as a return that is learned, is near zero on both sides."""

LEAP: Final = 4.0
"""Least size of its leap, in medians of its changes before: what wanders comes to the other side in small steps."""

GOALS: Final = frozenset({"reward", "rewards", "return", "returns", "accuracy"})
NO_GOALS: Final = frozenset({"loss", "rejected", "std", "length", "steps", "penalty", "margin", "margins", "error"})
"""Words in the names of numbers that training raises, and in those that only belong to one."""

NO_PARTS: Final = frozenset({"scale", "scaler", "weight", "coef", "coefficient"})
"""Words in the names of numbers that only belong to a loss."""

OF_MODULES: Final = frozenset({EULER_GAP, RECOMPUTED, RECOMPUTED_GRADIENT, WRITTEN_NORM, WRITTEN_LARGEST})
"""First words of the monitor's own numbers of single tensors and modules, which other rules judge."""


@dataclass(slots=True)
class _Number:
    """The newest values of a logged number with their steps, and how often the last one has repeated."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    repeats: int = 0

    def take(self, value: float, step: int) -> None:
        """Take in a value."""
        self.repeats = self.repeats + 1 if self.values and value == self.values[-1] else 0
        self.values.append(value)
        self.steps.append(step)

    @property
    def stands_still(self) -> bool:
        """Whether a number that was random repeats since then."""
        if self.repeats != REPEATS or self.values[-1] in BOUNDS or len(self.values) < MOVED + REPEATS + 1:
            return False
        before = np.array(self.values)[-MOVED - REPEATS - 1 : -REPEATS]
        moves = np.diff(before)
        turns = int((moves[1:] * moves[:-1] < 0).sum())
        if np.median(np.abs(moves[-TURNS:])) <= ROUNDING * np.median(np.abs(before)):
            return False
        return bool(moves.all()) and turns >= TURNS and bool((before % 1 != 0).mean() > 1 / 2)

    @property
    def exceeded(self) -> float | None:
        """The largest value before the last few, where all these are far above it and none was ever negative."""
        values = list(self.values)
        before, after = values[:-LASTS], values[-LASTS:]
        if len(before) < MOVED or min(values) <= 0 or min(after) <= BEYOND * max(before):
            return None
        return max(before)

    @property
    def collapsed(self) -> float | None:
        """The least value of some time ago, where the last few are all far below it and none was ever negative."""
        values = list(self.values)
        before, after = values[:MOVED], values[-LASTS:]
        if len(values) < REMEMBERED or min(values) < 0 or BEYOND * max(after) >= min(before):
            return None
        return min(before)

    @property
    def turned(self) -> float | None:
        """The usual size of a number that was above zero and has leapt below, or the other way round."""
        if len(self.values) < REMEMBERED or self.values[-LASTS - 1] * self.values[-LASTS] >= 0:
            return None  # as nearly always
        values = np.array(self.values)
        before, after = values[:-LASTS], values[-LASTS:]
        if len(np.unique(before)) < MOVED:
            return None
        sign, usual = np.sign(before[-1]), float(np.median(before))
        far = SIGN * abs(usual)
        if abs(after[0] - before[-1]) < LEAP * float(np.median(np.abs(np.diff(before)))):
            return None
        leapt = (sign * before > 0).all() and (sign * before[-AROUND:] >= far).all() and (-sign * after >= far).all()
        return usual if leapt else None


class LoggedNumbersRule(Rule):
    """Follows what the training logs beside its loss: parts of the loss, divergences, norms.

    A number that was another each time and is now exactly the same each time is not computed any more, or it compares
    what is equal: a policy with itself. A part of the loss, named so, that has left its range for good has other data
    or another formula. Other numbers may change their size by design, but one that keeps its sign, and its distance
    from zero, does not leap to the other side. Declared changes, and steps that are done again, begin anew.
    """

    name: ClassVar[str] = "logged_numbers"
    quantities: ClassVar[frozenset[str]] = frozenset(DECLARED)
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        self._declared, self._step = arrays.shared(DeclaredChanges), -1
        self._is_logged = arrays.series.column(bool, of=_is_logged)
        self._is_part = arrays.series.column(bool, of=_is_part_of_loss)
        self._is_goal = arrays.series.column(bool, of=_is_goal)
        self._numbers: dict[int, _Number] = {}

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the numbers that stand still, and those that have left for good what they were."""
        record, found = observed.record, []
        if self._declared.ends_stretch(record) or record.step < self._step:
            self._numbers.clear()
        self._step = record.step
        for row in rows_where(self._is_logged.values[record.where]).tolist():
            series_id, value = int(record.ids[row]), float(record.values[row, VALUE])
            if not np.isfinite(value):
                continue
            number = self._numbers.setdefault(series_id, _Number())
            number.take(value, record.step)
            if number.stands_still:
                found.append(self._finding(series_id, row, STALE, number, value, REPEATS + 1))
            elif (usual := self._left_by(number, series_id)) is not None:
                found.append(self._finding(series_id, row, SHIFT, number, usual, LASTS))
                self._numbers[series_id] = _Number()
        return found

    def _left_by(self, number: _Number, series_id: int) -> float | None:
        """Return the value that a number has left for good, by the rules for what it is."""
        exceeded = number.exceeded if self._is_part.values[series_id] else None
        collapsed = number.collapsed if self._is_goal.values[series_id] else None
        return next((usual for usual in (exceeded, number.turned, collapsed) if usual is not None), None)

    def _finding(self, series_id: int, row: int, kind: str, number: _Number, expected: float, lasts: int) -> Finding:
        detail = (kind, self.name, "value", number.values[-1], expected, SCORE)
        since, clean = number.steps[-lasts], number.steps[-lasts - 1]
        return Finding(series_id, row, *detail, step=since, last_clean=clean, passed_on=False)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the value, and since when it is so."""
        since = f"since step {anomaly.step}"
        if anomaly.kind == STALE:
            return (
                f"{subject} is exactly {anomaly.value:.6g} at each step {since}, and was another each time before: it "
                "is not computed any more, or it compares what is equal"
            )
        if anomaly.value * anomaly.expected < 0:
            return (
                f"{subject} is {anomaly.value:.4g} and has turned its sign {since}: it was around "
                f"{anomaly.expected:.4g}, and never beyond zero"
            )
        if anomaly.value < anomaly.expected:
            return (
                f"{subject} is {anomaly.value:.4g} {since}, less than a third of the least that it was before "
                f"({anomaly.expected:.4g})"
            )
        largest = f"the largest before ({anomaly.expected:.4g})"
        return f"{subject} is {anomaly.value:.4g}, and more than {BEYOND:g} times {largest} {since}"


def _is_logged(series: Series) -> bool:
    return series.scalar and series.name.partition(".")[0] not in OF_MODULES


def _is_part_of_loss(series: Series) -> bool:
    """Whether a logged number is named as a part of the loss: `loss_v`, `train/policy_loss`, but not `loss_scale`."""
    words = _words(series)
    return series.scalar and series.name != LOSS and LOSS in words and not words & NO_PARTS


def _is_goal(series: Series) -> bool:
    words = _words(series)
    return series.scalar and bool(words & GOALS) and not words & (NO_GOALS | NO_PARTS)


def _words(series: Series) -> set[str]:
    return set(re.split(r"[^a-z]+", series.name.lower()))
