"""Optimizer state that was lost: a mean of squares falls faster than its decay, or a step counter starts over."""

import math
from typing import Any, ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import STATE_RESET, Anomaly
from trainsentry.anomaly.features import NOTHING
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.optimizer.recorded_options import RecordedOptions
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.anomaly.series_facts import SQUARES
from trainsentry.collectors.series import OPTION, STEP_COUNTER
from trainsentry.collectors.statistics import INFS, MIN, NANS, NORM

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs; the bounds below hold for any gradients."""

COUNTED: Final = 10
"""Updates that a counter must have counted before it can be seen to start over."""

LEAST_DECAY: Final = 0.8
"""The smallest β assumed where no option tells it: 0.9 is the smallest in use, and the norm is rounded."""

UPDATES: Final = 2
"""Updates assumed for each step, so that a loop with two of them is no loss of state."""

LONGEST_GAP: Final = 100
"""Steps between two samples at which the bound stops to tell anything: 0.8^100 is 2e-10."""

LEAST_SHARE: Final = 0.25
"""Share of the rows that must have fallen: what is reset on purpose, as for the row of a new token, is less. Where
states were given to other parameters, some rise and some fall."""

DECAY_OPTION: Final = "betas.1"
OF_OPTION: Final = "exp_avg_sq"
"""The option that is β, and the state whose decay it is."""


class StateResetRule(Rule):
    """Finds state that has fallen below β^k of its norm k steps before, is negative, or counts from the start again.

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
        self._norm = arrays.series.column(np.float64)
        self._step = arrays.series.column(np.int64)
        self._rate = arrays.series.column(np.float64)  # updates that a counter counts in a step
        self._has_option = arrays.series.column(bool, of=lambda s: s.quantity == OF_OPTION)
        self._options = RecordedOptions(arrays)
        self._decay = math.inf
        self._goes_back = False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding for each state that was lost."""
        record = observed.record
        self._options.note(observed)
        self._decay = min(self._decay, self._options.smallest(DECAY_OPTION))
        restarted = self._restarted(observed)
        finite = (record.columns[NANS] == 0) & (record.columns[INFS] == 0)  # a norm is of the finite elements
        rows = rows_where(self._is_square.values[record.where] & finite)
        if not len(rows):
            return restarted
        ids = record.ids[rows]
        norm = record.columns[NORM, rows]
        gap = np.maximum(record.step - self._step.values[ids], 1)
        least = self._norm.values[ids] * self._decay_of(ids) ** np.minimum(gap, LONGEST_GAP)
        fallen = (norm < least) & (least > NOTHING) & (gap < LONGEST_GAP)
        negative = record.columns[MIN, rows] < -NOTHING
        self._norm.values[ids], self._step.values[ids] = norm, record.step
        lost = rows_where(fallen).tolist() if fallen.sum() > LEAST_SHARE * len(rows) and not self._goes_back else []
        return [
            *(_finding(int(ids[i]), int(rows[i]), "norm", float(norm[i]), float(least[i])) for i in lost),
            *(
                _finding(int(ids[i]), int(rows[i]), "min", float(record.values[rows[i], MIN]), 0.0)
                for i in rows_where(negative).tolist()
            ),
            *restarted,
        ]

    def _decay_of(self, ids: Any) -> Any:
        """Return the least factor of states in a step, shape (n,)."""
        known = self._decay**UPDATES if math.isfinite(self._decay) else LEAST_DECAY
        return np.where(self._has_option.values[ids], max(known, LEAST_DECAY), LEAST_DECAY)

    def _restarted(self, observed: Observed) -> list[Finding]:
        """Return a finding for each counter that starts over; note whether counters go back."""
        record = observed.record
        self._goes_back = False
        rows = rows_where(self._is_counter.values[record.where])
        if not len(rows):
            return []
        ids = record.ids[rows]
        count, before, rate = record.columns[NORM, rows], self._norm.values[ids], self._rate.values[ids]
        gap = np.maximum(record.step - self._step.values[ids], 1)
        counted = np.maximum(rate, 1.0) * gap
        restarted = (count < before) & (count <= counted) & (before > counted + COUNTED)
        self._goes_back = bool(((count < before) & ~restarted).any())
        self._rate.values[ids] = np.where(count > before, (count - before) / gap, rate)
        self._norm.values[ids], self._step.values[ids] = count, record.step
        return [
            _finding(int(ids[i]), int(rows[i]), "value", float(count[i]), float(before[i] + counted[i]), "optimizer")
            for i in rows_where(restarted).tolist()
        ]

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
                f"expected {anomaly.expected:.0f}: the optimizer state was lost"
            )
        return (
            f"the norm of {subject} is {anomaly.value:.3g} at step {anomaly.step}, below {anomaly.expected:.3g}, the "
            "least that its decay allows: the optimizer state was lost, or given to another parameter"
        )

    def saved(self, count: int) -> list[list[float]]:
        """Return norm and step of the first `count` series."""
        norms, steps = self._norm.values[:count].tolist(), self._step.values[:count].tolist()
        return [[float(norm), int(step)] for norm, step in zip(norms, steps, strict=True)]

    def adopt(self, series_id: int, saved: Any, position: int) -> None:
        """Restore norm and step of a series: state that a restart has lost is found."""
        self._norm.values[series_id], self._step.values[series_id] = saved[position][0], int(saved[position][1])


def _finding(
    series_id: int, row: int, statistic: str, value: float, expected: float, quantity: str | None = None
) -> Finding:
    detail = (STATE_RESET, StateResetRule.name, statistic, value, expected, SCORE)
    return Finding(series_id, row, *detail, quantity=quantity)
