"""Two weights that become equal: they share memory by mistake, or one is copied over the other at each step."""

from typing import Any, ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import STALE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, SeriesArrays, rows_where
from trainsentry.collectors.series import PARAMETER, UPDATE
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as four statistics of two tensors agree by no chance."""

APART: Final = 5
"""Samples in which a weight was like no other before it counts that it is: averages begin as copies of weights."""

TOGETHER: Final = 3
"""Samples in a row for which two must be equal, each time with other values: a target network is made equal to its
model every so often, and a model is copied into its average once, where that begins."""

MANY_ELEMENTS: Final = 64
"""Least elements of a weight: small ones are set to the same values more easily."""


class EqualWeightsRule(Rule):
    """Finds weights of one size whose statistics are the same since some sample, and were others before.

    Named is the weight that no optimizer updates, as that of a teacher or an average, or else the later one.
    """

    name: ClassVar[str] = "equal_weights"
    quantities: ClassVar[frozenset[str]] = frozenset({PARAMETER, UPDATE})
    statistics: ClassVar[frozenset[str]] = frozenset({"min", "max", "mean", "norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_weight = arrays.series.column(bool, of=lambda s: s.quantity == PARAMETER and s.micro_step == 0)
        self._apart, self._norm = arrays.series.column(np.int64), arrays.series.column(np.float64, np.nan)
        self._pairs: dict[tuple[int, int], list[int]] = {}  # the steps for which they have been equal
        self._last_step = -1

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the weights that are those of another one for the third time."""
        record = observed.record
        rows = rows_where(self._is_weight.values[record.where])
        if not len(rows):
            return []
        if record.step < self._last_step:  # the run has gone back
            self._pairs.clear()
        ids, columns = record.ids[rows], np.asarray(record.columns[[MIN, MAX, MEAN, NORM]][:, rows])
        pairs = _equal(ids, columns, observed.numel[rows])
        has_moved = {int(i) for i in ids[columns[3] != self._norm.values[ids]]}
        found = self._follow(observed, pairs, has_moved)
        self._pairs = {pair: since for pair, since in self._pairs.items() if pair in pairs or pair[0] not in ids}
        self._norm.values[ids] = columns[3]
        self._apart.values[ids] += 1
        for pair in pairs:
            self._apart.values[list(pair)] = 0
        self._last_step = record.step
        return found

    def _follow(self, observed: Observed, pairs: list[tuple[int, int]], has_moved: set[int]) -> list[Finding]:
        """Count the samples of the pairs that are equal now."""
        step, found = observed.record.step, []
        for pair in pairs:
            since = self._pairs.get(pair)
            if since is None and not (self._apart.values[list(pair)] >= APART).all():
                continue
            since = since if since is not None else [self._last_step]
            self._pairs[pair] = since
            if len(since) <= TOGETHER and has_moved.issuperset(pair):
                since.append(step)
                if len(since) > TOGETHER:
                    found.append(self._finding(observed, pair, since))
        return found

    def _finding(self, observed: Observed, pair: tuple[int, int], since: list[int]) -> Finding:
        series = observed.table.series
        updated = {s.name for s in series if s.quantity == UPDATE}
        copy, original = sorted(pair, key=lambda i: (series[i].name in updated, -i))
        detail = (STALE, self.name, series[original].name, float("nan"), float("nan"), SCORE)
        return Finding(copy, -1, *detail, step=since[1], last_clean=since[0], passed_on=False)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return which weight it is equal to, and since when."""
        return (
            f"{subject} has exactly the values of {anomaly.statistic} since step {anomaly.step}, and had others before:"
            " they share memory, or one is copied over the other at each step"
        )


def _equal(ids: Any, columns: Floats, numel: Floats) -> list[tuple[int, int]]:
    """Return the pairs of series whose statistics are the same, of those that are not constant."""
    varied = (numel >= MANY_ELEMENTS) & (columns[0] < columns[1])  # not of NaN either
    places = rows_where(varied)
    keys = np.concatenate((columns[:, places], numel[None, places])).T
    order = np.lexsort(keys.T)
    same = rows_where((keys[order[1:]] == keys[order[:-1]]).all(axis=1))
    found = (sorted((int(ids[places[order[i]]]), int(ids[places[order[i + 1]]]))) for i in same.tolist())
    return [(first, second) for first, second in found]
