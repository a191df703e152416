"""Optimizer state that was lost: a mean of squares falls faster than its decay, or a step counter starts over."""

import math
from typing import Any, ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import STATE_RESET, Anomaly
from trainsentry.anomaly.features import NOTHING
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.optimizer.recorded_options import ByParameter, ParameterNumbers, RecordedOptions
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.rules.scalars.thawed_layers import ThawedLayers
from trainsentry.anomaly.series_arrays import Floats, SeriesArrays, rows_where
from trainsentry.anomaly.series_facts import SQUARES
from trainsentry.collectors.series import OPTION, STEP_COUNTER, Series
from trainsentry.collectors.statistics import INFS, MIN, NANS, NORM

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs; the bounds below hold for any gradients."""

COUNTED: Final = 10
"""Updates that a counter must have counted before it can be seen to start over."""

LEAST_DECAY: Final = 0.8
"""The smallest β assumed for a step where options and counters do not tell it: 0.9 is the smallest in use, and the
norm is rounded."""

ROUNDING: Final = 0.99
"""Share of the bound that must remain where both tell it: the norm is rounded."""

YOUNG: Final = 10
"""Steps of a state before it is judged without a known β: that of Adafactor is 1 − t^−0.8 at update t (Shazeer and
Stern, "Adafactor", 2018), 0.43 at the second one."""

LONGEST_GAP: Final = 100
"""Steps between two samples at which the bound stops to tell anything: 0.8^100 is 2e-10."""

LEAST_SHARE: Final = 0.25
"""Share of the rows that must have fallen: what is reset on purpose, as for the row of a new token, is less. Where
states were given to other parameters, some rise and some fall."""

DECAY_OPTION: Final = "betas.1"
OF_OPTION: Final = "exp_avg_sq"
"""The option that is β, and the state whose decay it is."""


class StateResetRule(Rule):
    """Finds state that has fallen below β^k of its norm k updates before, is negative, or counts from the start again.

    A counter that returns to an earlier value belongs to a run that is rolled back and is left alone, as all its state
    is, unless it returns to a value before its second sample.
    """

    name: ClassVar[str] = "state_reset"
    speaks_for: ClassVar[str | None] = STATE_RESET
    quantities: ClassVar[frozenset[str]] = frozenset({OPTIMIZER_STATE, OPTION})
    statistics: ClassVar[frozenset[str]] = frozenset({"norm", "min"})
    state_key: ClassVar[str | None] = "squares"

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_square = arrays.series.column(bool, of=lambda s: s.quantity in SQUARES)
        self._is_counter = arrays.series.column(bool, of=lambda s: s.quantity == STEP_COUNTER and not s.scalar)
        self._owners = ParameterNumbers()
        self._owner = arrays.series.column(np.int64, -1, of=self._owner_of)
        # At the last sample: norm, elements, step, and of squares their parameter's count of updates.
        self._norm, self._numel = arrays.series.column(np.float64), arrays.series.column(np.float64)
        self._step = arrays.series.column(np.int64)
        self._count, self._first = arrays.series.column(np.float64, np.nan), arrays.series.column(np.int64, -1)
        self._rate = arrays.series.column(np.float64)  # updates that a counter counts in a step
        self._has_option = arrays.series.column(bool, of=lambda s: s.quantity == OF_OPTION)
        self._options, self._thawed = RecordedOptions(arrays), arrays.shared(ThawedLayers)
        self._counts = ByParameter(1)  # of this step
        self._least_beta = math.inf
        self._now, self._goes_back = -1, False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding for each state that was lost; a step may come in several records."""
        record = observed.record
        if record.step != self._now:
            self._now, self._goes_back = record.step, False
            self._counts.clear()
        self._note_options(observed)
        self._thawed.thaws(record)
        restarted = self._restarted(observed)
        finite = (record.columns[NANS] == 0) & (record.columns[INFS] == 0)  # a norm is of the finite elements
        rows = rows_where(self._is_square.values[record.where] & finite)
        if not len(rows):
            return restarted
        ids, norm = record.ids[rows], record.columns[NORM, rows]
        least = self._least(ids, observed.numel[rows], record.step)
        fallen = (norm < least) & (least > NOTHING)
        negative = record.columns[MIN, rows] < -NOTHING
        self._norm.values[ids], self._step.values[ids] = norm, record.step
        first = self._first.values
        first[ids] = np.where((first[ids] < 0) | (first[ids] > record.step), record.step, first[ids])
        self._numel.values[ids], self._count.values[ids] = (
            observed.numel[rows],
            self._counts.get(self._owner.values[ids])[0],
        )
        lost = rows_where(fallen).tolist() if fallen.sum() > LEAST_SHARE * len(rows) and not self._goes_back else []
        return [
            *(_finding(int(ids[i]), int(rows[i]), "norm", float(norm[i]), float(least[i])) for i in lost),
            *(
                _finding(int(ids[i]), int(rows[i]), "min", float(record.values[rows[i], MIN]), 0.0)
                for i in rows_where(negative).tolist()
            ),
            *restarted,
        ]

    def _least(self, ids: Any, numel: Floats, step: int) -> Floats:
        """Return the least norms that states may have, shape (n,): 0 for another part, a first one, or a step back."""
        gap = step - self._step.values[ids]
        decay = LEAST_DECAY ** np.clip(gap, 0, LONGEST_GAP).astype(np.float64)
        before, count = self._count.values[ids], self._counts.get(self._owner.values[ids])[0]
        if 0 < self._least_beta < 1:
            exact = (count > before) & (before > 0) & self._has_option.values[ids]
            decay[exact] = ROUNDING * _least_share(self._least_beta, before[exact], count[exact])
        judged = (gap > 0) & (gap < LONGEST_GAP) & (numel == self._numel.values[ids])
        judged &= self._step.values[ids] >= self._thawed.at  # who thaws layers may clear the state
        if not 0 < self._least_beta < 1:
            judged &= (self._first.values[ids] >= 0) & (step - self._first.values[ids] >= YOUNG)
        found: Floats = np.where(judged, self._norm.values[ids] * decay, 0.0)
        return found

    def _note_options(self, observed: Observed) -> None:
        """Take in the smallest β that any group has had; none is known where a group has none."""
        self._options.note(observed)
        for group in self._options.groups():
            self._least_beta = min(self._least_beta, group.get(DECAY_OPTION, -math.inf))

    def _restarted(self, observed: Observed) -> list[Finding]:
        """Return a finding for each counter that starts over; note what counters count, and whether they go back."""
        record = observed.record
        rows = rows_where(self._is_counter.values[record.where])
        if not len(rows):
            return []
        ids = record.ids[rows]
        count, before, rate = record.columns[NORM, rows], self._norm.values[ids], self._rate.values[ids]
        self._counts.set(self._owner.values[ids], count[None])
        gap = np.maximum(record.step - self._step.values[ids], 1)
        counted = np.maximum(rate, 1.0) * gap
        restarted = (count < before) & (count <= counted) & (before > counted + COUNTED)
        is_meant = self._step.values[ids] < self._thawed.at
        self._goes_back |= bool(((count < before) & ~restarted).any())
        self._rate.values[ids] = np.where(count > before, (count - before) / gap, rate)
        self._norm.values[ids], self._step.values[ids] = count, record.step
        restarted &= ~is_meant
        return [
            _finding(int(ids[i]), int(rows[i]), "value", float(count[i]), float(before[i] + counted[i]), "optimizer")
            for i in rows_where(restarted).tolist()
        ]

    def _owner_of(self, series: Series) -> int:
        followed = series.quantity in SQUARES or series.quantity == STEP_COUNTER
        return self._owners.of(series) if followed and not series.scalar else -1

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the state's number, and the bound that it breaks."""
        if anomaly.statistic == "min":
            return f"{subject} is negative at step {anomaly.step} ({anomaly.value:.3g}), although it averages squares"
        if math.isnan(anomaly.value):
            return f"{subject} is gone at step {anomaly.step}"
        if anomaly.statistic == "value":
            return (
                f"the optimizer's step counter of {anomaly.name} is {anomaly.value:.0f} at step {anomaly.step}, "
                f"expected {anomaly.expected:.0f}: it was set back, or the optimizer state was lost"
            )
        return (
            f"the norm of {subject} is {anomaly.value:.3g} at step {anomaly.step}, below {anomaly.expected:.3g}, the "
            "least that its decay allows: the optimizer state was lost, or given to another parameter"
        )

    def saved(self, count: int) -> list[list[float]]:
        """Return norm, step and elements of the first `count` series."""
        columns = (self._norm, self._step, self._numel)
        return [list(each) for each in zip(*(c.values[:count].tolist() for c in columns), strict=True)]

    def adopt(self, series_id: int, saved: Any, position: int) -> None:
        """Restore norm, step and elements of a series: state that a restart has lost is found."""
        norm, step, *numel = saved[position]
        self._norm.values[series_id], self._step.values[series_id] = norm, int(step)
        self._first.values[series_id] = max(int(step) - YOUNG, 0)
        self._numel.values[series_id] = numel[0] if numel else 0.0  # as an earlier version saved it: not judged once


def _least_share(beta: float, before: Floats, count: Floats) -> Floats:
    """Return the least share of squares that is left from one count of updates to another.

    It is β^k for k updates. Some optimizers correct the bias in the average itself, with β·(1 − β^(t−1)) / (1 − β^t) at
    update t, whose product is less while t is small.

    >>> _least_share(0.5, np.array([1.0, 50.0]), np.array([2.0, 51.0])).round(3).tolist()
    [0.333, 0.5]
    """
    found: Floats = beta ** (count - before) * (1 - beta**before) / (1 - beta**count)
    return found


def _finding(
    series_id: int, row: int, statistic: str, value: float, expected: float, quantity: str | None = None
) -> Finding:
    detail = (STATE_RESET, StateResetRule.name, statistic, value, expected, SCORE)
    return Finding(series_id, row, *detail, quantity=quantity)
