"""A weight whose optimizer state was there at every sample and is gone."""

import math
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import STATE_RESET, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.rules.scalars.thawed_layers import ThawedLayers
from trainsentry.anomaly.series_arrays import Columns, SeriesArrays, rows_where
from trainsentry.collectors.series import LOST_STATE, PARAMETER, STEP_COUNTER, Series

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs; state does not vanish by itself."""

BOTH_BEFORE: Final = 5
"""Samples in a row with both the weight and its state, before missing state counts as lost."""


class LostStateRule(Rule):
    """Finds weights that are sampled without their state; it knows when the next step begins, as a step has parts.

    States that are all missing are lost where the collector has seen it: else they are not sampled in that step, as
    weights are sampled more often, or an edit of the configuration has switched the sampling off.
    """

    name: ClassVar[str] = "missing_state"
    quantities: ClassVar[frozenset[str]] = frozenset({PARAMETER, OPTIMIZER_STATE, LOST_STATE})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        self._in_step = arrays.series.column(bool)
        self._step = -1
        self._weights: dict[tuple[str, int, int], int] = {}
        pairs: list[tuple[int, int]] = []
        self._pairs = Columns(pairs)
        self._weight = self._pairs.column(np.int64, of=lambda pair: pair[0])
        self._state = self._pairs.column(np.int64, of=lambda pair: pair[1])
        self._both = self._pairs.column(np.int64)
        self._tells = arrays.series.column(bool, of=lambda s: s.scalar and s.name == LOST_STATE)
        self._is_seen = False
        self._thawed = arrays.shared(ThawedLayers)

        def pair(first: int, new: Sequence[Series]) -> None:
            pairs.extend(self._new_pairs(first, new))
            self._pairs.grow()

        arrays.series.before_growth(pair)

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the first state that was missing in the step before this one."""
        record = observed.record
        found = []
        if record.step != self._step:
            found = self._missing()
            if self._thawed.at == self._step:  # who thaws layers may clear the state
                found = []
            self._step, self._is_seen = record.step, False
            self._in_step.values[:] = False
        self._thawed.thaws(record)
        self._in_step.values[record.where] = True
        self._is_seen |= bool(self._tells.values[record.where].any())
        return found

    def _missing(self) -> list[Finding]:
        in_step, both = self._in_step.values, self._both.values
        weights, state = in_step[self._weight.values], in_step[self._state.values]
        gone = rows_where(weights & ~state & (both >= BOTH_BEFORE))
        if not (self._is_seen or state.any()):
            return []
        both[:] = np.where(weights, np.where(state, both + 1, 0), both)
        nan = math.nan
        ids = [int(self._state.values[i]) for i in gone[:1]]  # states that vanish together need one finding
        return [Finding(i, -1, STATE_RESET, self.name, "norm", nan, nan, SCORE, step=self._step) for i in ids]

    def _new_pairs(self, first: int, new: Sequence[Series]) -> list[tuple[int, int]]:
        """Return weight and state of the new state series whose weight is known."""
        for i, s in enumerate(new, first):
            if s.quantity == PARAMETER:
                self._weights[s.name, s.vpp_stage, s.micro_step] = i
        states = [(i, s) for i, s in enumerate(new, first) if s.is_state and s.quantity != STEP_COUNTER]
        pairs = [(self._weights.get((s.name, s.vpp_stage, s.micro_step), -1), i) for i, s in states]
        return [pair for pair in pairs if pair[0] >= 0]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return which state is gone, and since when."""
        return f"{subject} is gone at step {anomaly.step}, although its parameter is still there"
