"""Invariant: a weight whose optimizer state was there at every sample still has it."""

import math
from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import STATE_RESET
from trainsentry.anomaly.finding import Finding
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import PARAMETER, STEP_COUNTER, SeriesTable

NAME: Final = "missing_state"
SCORE: Final = 60.0

BOTH_BEFORE: Final = 5
"""Samples in a row in which a weight and its state were there together, before state that is missing counts as lost."""


class LostStateRule:
    """Finds weights that are sampled without their state: known when the next step begins, as one has several parts."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._weights: dict[tuple[str, int, int], int] = {}
        self._state, self._weight = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._both = np.zeros(0, np.int64)
        self._seen = np.zeros(0, bool)
        self._step = -1

    def judge(self, record: StepRecord) -> list[Finding]:
        """Return the first state that was missing in the step before this one."""
        found = []
        if record.step != self._step:
            found = self._missing()
            self._step = record.step
            self._seen[:] = False
        self._refresh()
        self._seen[record.where] = True
        return found

    def _missing(self) -> list[Finding]:
        weights, state = self._seen[self._weight], self._seen[self._state]
        gone = np.flatnonzero(weights & ~state & (self._both >= BOTH_BEFORE))
        self._both = np.where(weights, np.where(state, self._both + 1, 0), self._both)
        nan = math.nan
        ids = [int(self._state[at]) for at in gone[:1]]  # of all that went at once one is enough
        return [Finding(i, -1, STATE_RESET, NAME, "norm", nan, nan, SCORE, step=self._step) for i in ids]

    def _refresh(self) -> None:
        known = len(self._seen)
        new = self.table.series[known:]
        if not new:
            return
        self._seen = np.append(self._seen, np.zeros(len(new), bool))
        for i, s in enumerate(new, known):
            if s.quantity == PARAMETER:
                self._weights[s.name, s.vpp_stage, s.micro_step] = i
        pairs = [
            (i, self._weights.get((s.name, s.vpp_stage, s.micro_step), -1))
            for i, s in enumerate(new, known)
            if s.is_state and s.quantity != STEP_COUNTER
        ]
        pairs = [pair for pair in pairs if pair[1] >= 0]
        self._state = np.append(self._state, [state for state, _ in pairs]).astype(np.int64)
        self._weight = np.append(self._weight, [weight for _, weight in pairs]).astype(np.int64)
        self._both = np.append(self._both, np.zeros(len(pairs), np.int64))
