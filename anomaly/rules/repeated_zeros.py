"""A dropout that hides as many elements at each sample: it draws the same mask again and again."""

import math
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import STALE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_INPUT, ACTIVATION_OUTPUT
from trainsentry.collectors.statistics import ZEROS

SCORE: Final = 55.0
"""Deviations: above every spike of healthy runs, below the rules that read the cause itself."""

CHANGES_BEFORE: Final = 10
"""Samples whose number of zeros is another than that of the sample before, until a repetition is judged."""

LEAST_SPREAD: Final = 4.0
"""Mean difference of two samples' numbers of zeros, in elements: smaller ones repeat by chance too often."""

CHANCE: Final = 1e-9
"""Probability that healthy samples repeat their number of zeros so often in a row."""

EQUAL_BY_CHANCE: Final = 1 / math.pi
"""Probability that two counts are equal, times their mean difference d: counts of independent elements are nearly
normal, so two are equal with probability 1/(2√π σ), and d is 2σ/√π."""

LEAST_REPEATS: Final = 3
"""Repetitions in a row at the least, however large a tensor is."""

NEVER: Final = np.iinfo(np.int64).max

LONGEST_BEFORE: Final = 1
"""Repetitions in a row that a healthy run may have had; where there were more, numbers of zeros come in steps."""


RECENT: Final = 8
"""Newest differences whose middle one must be no rarer: units that have settled are on or off for whole batches."""

TIMES_CHANCE: Final = 4.0
"""Factor within which differences are those of elements that are hidden independently, 2√(n·p·(1 − p)/π) in the mean.
Where whole samples or channels are, they are √(their elements) times larger, and few numbers occur: of 16 images a drop
path hides two, three or four."""


class RepeatedZerosRule(Rule):
    """Counts for each activation how often in a row its number of zeros is the one of the sample before.

    What dropout hides is drawn anew in each pass, so that the number varies by its square root. A rectifier's varies
    with the batch. Padding may be the same for some batches, so nothing is said where the model's input repeats its
    number of zeros too.
    """

    name: ClassVar[str] = "repeated_zeros"
    quantities: ClassVar[frozenset[str]] = frozenset({ACTIVATION_INPUT, ACTIVATION_OUTPUT})
    statistics: ClassVar[frozenset[str]] = frozenset({"zeros"})

    def __init__(self, arrays: SeriesArrays) -> None:
        series = arrays.series
        self._follows = series.column(bool, of=lambda s: s.quantity in self.quantities)
        self._is_input = series.column(bool, of=lambda s: s.is_model_input)
        self._numel, self._count = series.column(np.float64), series.column(np.float64, -1.0)
        self._changes, self._moved = series.column(np.int64), series.column(np.float64)
        self._repeats, self._longest = series.column(np.int64), series.column(np.int64)
        self._step, self._since = series.column(np.int64, -1), series.column(np.int64, -1)
        self._before = series.column(np.int64, -1)
        self._lately = series.column(np.float64, np.inf, shape=(RECENT,))

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the activations that have repeated their number of zeros for long enough, once for each stretch."""
        record = observed.record
        share = record.columns[ZEROS]
        rows = rows_where(self._follows.values[record.where] & (share > 0) & (share < 1) & ~observed.excused)
        if not len(rows):
            return []
        ids, numel = record.ids[rows].astype(np.int64), observed.numel[rows]
        self._take_in(ids, np.rint(share[rows] * numel), numel, record.step)
        repeats, inputs = self._repeats.values[ids], self._is_input.values[ids]
        judged = (self._changes.values[ids] >= CHANGES_BEFORE) & (self._longest.values[ids] <= LONGEST_BEFORE)
        found = rows_where(judged & (repeats >= LEAST_REPEATS) & ~inputs)
        if not len(found) or (repeats[inputs] >= LEAST_REPEATS).any():
            return []
        found = found[repeats[found] == self._needed(ids[found])]
        return [self._finding(int(rows[i]), int(ids[i]), float(share[rows[i]])) for i in found.tolist()]

    def _take_in(self, ids: Integers, count: Floats, numel: Floats, step: int) -> None:
        last, repeats, longest = self._count.values, self._repeats.values, self._longest.values
        known = (last[ids] >= 0) & (self._numel.values[ids] == numel)
        same = known & (count == last[ids])
        moved, still, begins = ids[known & ~same], ids[same], ids[same & (repeats[ids] == 0)]
        self._since.values[begins] = self._step.values[begins]
        longest[moved] = np.maximum(longest[moved], repeats[moved])
        self._changes.values[moved] += 1
        distance = abs(count - last[ids])[known & ~same]
        self._moved.values[moved] += distance
        self._lately.values[self._changes.values[moved] % RECENT, moved] = distance
        repeats[ids[~same]] = 0
        repeats[still] += 1
        changed = ids[~same]
        self._before.values[changed] = self._step.values[changed]
        self._changes.values[ids[~known]] = 0
        self._moved.values[ids[~known]] = 0.0
        last[ids], self._numel.values[ids], self._step.values[ids] = count, numel, step

    def _needed(self, ids: Integers) -> Integers:
        """Return how many repetitions in a row chance does not make; more than there can be for a small spread."""
        mean = self._moved.values[ids] / np.maximum(self._changes.values[ids], 1)
        lately = np.median(self._lately.values[:, ids], axis=0)
        spread, numel = np.minimum(mean, lately), self._numel.values[ids]
        share = self._count.values[ids] / numel
        chance = 2 * np.sqrt(numel * share * (1 - share) / math.pi)
        varies = (spread >= np.maximum(LEAST_SPREAD, chance / TIMES_CHANCE)) & (mean <= TIMES_CHANCE * chance)
        equal = EQUAL_BY_CHANCE / np.maximum(spread, LEAST_SPREAD)
        needed = np.ceil(math.log(CHANCE) / np.log(equal)).astype(np.int64)
        return np.where(varies, np.maximum(needed, LEAST_REPEATS), NEVER)

    def _finding(self, row: int, series_id: int, share: float) -> Finding:
        since, before = int(self._since.values[series_id]), int(self._before.values[series_id])
        return Finding(series_id, row, STALE, self.name, "zeros", share, share, SCORE, step=since, last_clean=before)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the share of zeros that does not change any more."""
        return (
            f"{subject} has exactly as many zeros at each sample since step {anomaly.step} ({anomaly.value:.3g} of its "
            "elements), and had another number at each sample before: the same mask is drawn again and again"
        )
