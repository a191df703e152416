"""Invariants of an optimizer's state: squares fall no faster than their decay allows, and steps are counted on."""

from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import STATE_RESET
from trainsentry.anomaly.features import NOTHING
from trainsentry.anomaly.finding import Finding
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import STEP_COUNTER, SeriesTable
from trainsentry.collectors.statistics import MIN, NORM

NAME: Final = "state_reset"
SCORE: Final = 60.0

SQUARES: Final = frozenset({"exp_avg_sq", "moment2", "moments2", "square_avg", "v"})
"""State that averages squares: v' = β·v + (1 − β)·g² ≥ β·v (Kingma and Ba, "Adam", 2015; RMSprop)."""

COUNTED: Final = 10
"""Updates that a counter must have counted before it can be seen to have begun anew."""

LEAST_DECAY: Final = 0.8
"""The smallest β assumed: 0.9 is the smallest in use, and the norm is rounded."""

SHARE: Final = 0.5
"""Share of the rows that must have fallen, so that a group that was reset on purpose (a new token's row) is not all."""


class StateResetRule:
    """Finds state that has fallen below β^k of what it was k steps before, is negative, or counts from the start again.

    A counter that goes back to what it was earlier belongs to a run that is rolled back, and is left alone, unless it
    goes back to before its second sample.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._mask = np.zeros(0, bool)
        self._counter = np.zeros(0, bool)
        self._norm = np.zeros(0)
        self._step = np.zeros(0, np.int64)
        self._rate = np.zeros(0)

    def saved(self, count: int) -> list[list[float]]:
        """Return norm and step of the first `count` series as plain data."""
        self._refresh()
        return [[float(n), int(s)] for n, s in zip(self._norm[:count], self._step[:count], strict=True)]

    def adopt(self, series_id: int, saved: list[float]) -> None:
        """Go on from what was saved of a series: state that a restart has lost shows."""
        self._refresh()
        self._norm[series_id], self._step[series_id] = saved[0], int(saved[1])

    def judge(self, record: StepRecord) -> list[Finding]:
        """Return what was lost."""
        self._refresh()
        anew = self._counts_anew(record)
        rows = np.flatnonzero(self._mask[record.where])
        if not len(rows):
            return anew
        ids = record.ids[rows]
        norm = record.columns[NORM, rows]
        apart = np.maximum(record.step - self._step[ids], 1)
        least = self._norm[ids] * LEAST_DECAY ** np.minimum(apart, 100)
        fallen = (norm < least) & (least > NOTHING) & (apart < 100)
        negative = record.columns[MIN, rows] < -NOTHING
        self._norm[ids], self._step[ids] = norm, record.step
        found = []
        if fallen.sum() > SHARE * len(rows):
            for at in np.flatnonzero(fallen).tolist():
                value, expected = float(norm[at]), float(least[at])
                found.append(self._finding(int(ids[at]), int(rows[at]), "norm", value, expected))
        for at in np.flatnonzero(negative).tolist():
            value = float(record.values[rows[at], MIN])
            found.append(self._finding(int(ids[at]), int(rows[at]), "min", value, 0.0))
        return found + anew

    def _counts_anew(self, record: StepRecord) -> list[Finding]:
        rows = np.flatnonzero(self._counter[record.where])
        if not len(rows):
            return []
        ids = record.ids[rows]
        count, before = record.columns[NORM, rows], self._norm[ids]
        apart = np.maximum(record.step - self._step[ids], 1)
        due = np.maximum(self._rate[ids], 1.0) * apart
        anew = (count < before) & (count <= due) & (before > due + COUNTED)
        self._rate[ids] = np.where(count > before, (count - before) / apart, self._rate[ids])
        self._norm[ids], self._step[ids] = count, record.step
        return [
            self._finding(int(ids[at]), int(rows[at]), "value", float(count[at]), float(before[at] + due[at]))
            for at in np.flatnonzero(anew).tolist()
        ]

    def _refresh(self) -> None:
        new = self.table.series[len(self._mask) :]
        if new:
            self._mask = np.append(self._mask, [s.quantity in SQUARES for s in new])
            self._counter = np.append(self._counter, [s.quantity == STEP_COUNTER and not s.scalar for s in new])
            self._norm = np.append(self._norm, np.zeros(len(new)))
            self._step = np.append(self._step, np.zeros(len(new), np.int64))
            self._rate = np.append(self._rate, np.zeros(len(new)))

    @staticmethod
    def _finding(series_id: int, row: int, statistic: str, value: float, expected: float) -> Finding:
        return Finding(series_id, row, STATE_RESET, NAME, statistic, value, expected, SCORE)
