"""A buffer that never changed and is suddenly another: a mask, a position table or an index that was overwritten."""

from collections import defaultdict
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import NONFINITE, SHIFT, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.nonfinite import SCORE as NONFINITE_SCORE
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, SeriesArrays, rows_where
from trainsentry.collectors.series import BUFFER, TRAINING_MODE, Series
from trainsentry.collectors.statistics import (
    INFS,
    MAX,
    MEAN,
    MIN,
    NANS,
    NORM,
    STATISTICS,
    VALUE,
    ZEROS,
)

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as the buffer was equal to the bit in every sample before."""

CONSTANT_BEFORE: Final = 6
"""Samples in which a buffer must have been the same: 60 steps by default, after schedules have warmed up."""

TOGETHER: Final = 2
"""Buffers of one kind whose change at the same step is the program's own: caches that are built again, a schedule."""


TELLING: Final = (NORM, MEAN, ZEROS, INFS, NANS, MAX, MIN)
"""Statistics in the order in which they tell a person what changed."""

WORDS: Final = {"zeros": "its share of zeros is", "infs": "its number of Inf is", "nans": "its number of NaN is"}


class ConstantBufferRule(Rule):
    """Compares each sample of a buffer with the one before, exactly.

    A change is by design where the buffer's shape changes too, where modules switch between training and evaluation,
    where a buffer of the same name in another module has changed before, and where several of that name change at once.
    """

    name: ClassVar[str] = "constant_buffer"
    quantities: ClassVar[frozenset[str]] = frozenset({BUFFER, TRAINING_MODE})
    statistics: ClassVar[frozenset[str]] = frozenset(STATISTICS)

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_buffer = arrays.series.column(bool, of=lambda s: s.quantity == BUFFER)
        self._is_mode = arrays.series.column(bool, of=lambda s: s.quantity.startswith(TRAINING_MODE))
        self._own_name = arrays.series.column(np.int64, -1, of=self._own_name_of)
        self._names: dict[str, int] = {}
        self._last = arrays.series.column(np.int64)
        self._values = arrays.series.column(np.float64, np.nan, shape=(VALUE,))
        self._layout = arrays.series.column(np.int64, -1)
        self._same = arrays.series.column(np.int64, -1)
        self._changing: set[int] = set()
        self._mode_changed = False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the buffers that changed for the first time."""
        record = observed.record
        rows = rows_where(self._is_buffer.values[record.where])
        self._mode_changed |= bool(self._is_mode.values[record.where].any())
        if not len(rows):
            return []
        ids, prints = record.ids[rows].astype(np.int64), record.prints[rows]
        layouts = record.layouts[rows]
        first = self._same.values[ids] < 0
        changed = (prints != self._last.values[ids]) & ~first & (layouts == self._layout.values[ids])
        before = self._same.values[ids].copy()
        earlier = self._values.values[:, ids].copy()
        self._same.values[ids] = np.where(first | (layouts != self._layout.values[ids]) | changed, 0, before + 1)
        self._last.values[ids], self._layout.values[ids] = prints, layouts
        self._values.values[:, ids] = record.values[rows, :VALUE].T
        suspects = self._alone(ids[changed], before[changed])
        by_design, self._mode_changed = self._mode_changed, False
        if by_design:
            return []
        at = {int(series_id): i for i, series_id in enumerate(ids.tolist())}
        new = record.values[rows]
        return [self._finding(i, int(rows[at[i]]), new[at[i]], earlier[:, at[i]]) for i in suspects]

    def _alone(self, changed: Integers, before: Integers) -> list[int]:
        """Return the changed buffers that were constant, of names of which no other changes or has changed."""
        by_name: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for series_id, samples in zip(changed.tolist(), before.tolist(), strict=True):
            by_name[int(self._own_name.values[series_id])].append((series_id, samples))
        found = []
        for name, members in by_name.items():
            known = name in self._changing
            self._changing.add(name)
            if not known and len(members) < TOGETHER:
                found += [series_id for series_id, samples in members if samples >= CONSTANT_BEFORE]
        return found

    def _finding(self, series_id: int, row: int, now: Floats, before: Floats) -> Finding:
        """Return the finding, in the first of the telling statistics that differs."""
        differing = (i for i in TELLING if not np.array_equal(now[i], before[i], equal_nan=True))
        which = next(differing, NORM)
        kind, score = SHIFT, SCORE
        if now[NANS] > before[NANS]:
            which, kind, score = NANS, NONFINITE, NONFINITE_SCORE + 1.0  # says more than that it is not finite
        detail = (kind, self.name, STATISTICS[which], float(now[which]), float(before[which]), score)
        return Finding(series_id, row, *detail, passed_on=False)

    def _own_name_of(self, series: Series) -> int:
        if series.quantity != BUFFER:
            return -1
        return self._names.setdefault(series.name.rpartition(".")[2], len(self._names))

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return what changed."""
        words = WORDS.get(anomaly.statistic, f"its {anomaly.statistic} is")
        return (
            f"{subject} never changed, and holds other values at step {anomaly.step}: {words} {anomaly.value:.6g}, "
            f"before it was {anomaly.expected:.6g}"
        )
