"""Invariants of an optimizer's state: squares fall no faster than their decay allows, and steps are counted on."""

from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import STATE_RESET
from trainsentry.anomaly.features import NOTHING
from trainsentry.anomaly.finding import Finding
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import PARAMETER, STEP_COUNTER, SeriesTable
from trainsentry.collectors.statistics import MIN, NORM

NAME: Final = "state_reset"
SCORE: Final = 60.0

SQUARES: Final = frozenset({"exp_avg_sq", "moment2", "moments2", "square_avg", "v"})
"""State that averages squares: v' = β·v + (1 − β)·g² ≥ β·v (Kingma and Ba, "Adam", 2015; RMSprop)."""

COUNTED: Final = 10
"""Updates that a counter must have counted before it can be seen to have begun anew."""

LEAST_DECAY: Final = 0.8
"""The smallest β assumed: 0.9 is the smallest in use, and the norm is rounded."""

BOTH_BEFORE: Final = 5
"""Steps in a row in which weights and state were sampled together, before state that is missing counts as lost."""

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
        self._parameter = np.zeros(0, bool)
        self._is_state = np.zeros(0, bool)
        self._current, self._parts, self._both, self._state = -1, [False, False], 0, -1
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
        gone = self._gone(record) + self._counts_anew(record)
        rows = np.flatnonzero(self._mask[record.where])
        if not len(rows):
            return gone
        ids = record.ids[rows]
        norm = record.values[rows, NORM]
        apart = np.maximum(record.step - self._step[ids], 1)
        least = self._norm[ids] * LEAST_DECAY ** np.minimum(apart, 100)
        fallen = (norm < least) & (least > NOTHING) & (apart < 100)
        negative = record.values[rows, MIN] < -NOTHING
        self._norm[ids], self._step[ids] = norm, record.step
        found = []
        if fallen.sum() > SHARE * len(rows):
            for at in np.flatnonzero(fallen).tolist():
                value, expected = float(norm[at]), float(least[at])
                found.append(self._finding(int(ids[at]), int(rows[at]), "norm", value, expected))
        for at in np.flatnonzero(negative).tolist():
            value = float(record.values[rows[at], MIN])
            found.append(self._finding(int(ids[at]), int(rows[at]), "min", value, 0.0))
        return found + gone

    def _counts_anew(self, record: StepRecord) -> list[Finding]:
        rows = np.flatnonzero(self._counter[record.where])
        ids = record.ids[rows]
        count, before = record.values[rows, NORM], self._norm[ids]
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
            self._parameter = np.append(self._parameter, [s.quantity == PARAMETER for s in new])
            self._is_state = np.append(self._is_state, [s.is_state and s.quantity != STEP_COUNTER for s in new])
            self._norm = np.append(self._norm, np.zeros(len(new)))
            self._step = np.append(self._step, np.zeros(len(new), np.int64))
            self._rate = np.append(self._rate, np.zeros(len(new)))

    def _gone(self, record: StepRecord) -> list[Finding]:
        """Return that the step before had weights and no state, where it had both so far; a step has several parts."""
        found = []
        if record.step != self._current:
            if self._state >= 0 and self._parts[0] and not self._parts[1] and self._both >= BOTH_BEFORE:
                nan = float("nan")
                found = [Finding(self._state, -1, STATE_RESET, NAME, "norm", nan, nan, SCORE, True, self._current)]
            if self._parts[0]:
                self._both = self._both + 1 if self._parts[1] else 0
            self._current, self._parts = record.step, [False, False]
        self._parts[0] |= bool(self._parameter[record.where].any())
        states = np.flatnonzero(self._is_state[record.where])
        if len(states):
            self._parts[1], self._state = True, int(record.ids[states[0]])
        return found

    @staticmethod
    def _finding(series_id: int, row: int, statistic: str, value: float, expected: float) -> Finding:
        return Finding(series_id, row, STATE_RESET, NAME, statistic, value, expected, SCORE)
