"""Changes that are known: factors that are taken out of sizes, and changes that the user declares."""

import math
from functools import partial
from typing import Final

import numpy as np

from trainsentry.anomaly.rules.mode_change import Normalisations
from trainsentry.anomaly.rules.module_setting import Dropouts
from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.rules.scalars.declared_changes import DeclaredChanges
from trainsentry.anomaly.rules.scalars.rate_changes import RateChanges
from trainsentry.anomaly.series_arrays import Floats, Mask, SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    LEARNING_RATE,
    OPTIMIZER_RATE,
    UPDATE,
    Series,
)
from trainsentry.collectors.statistics import INFS, NANS, VALUE

PROPORTIONAL: Final = {LEARNING_RATE: (UPDATE,), "loss_scale": (ACTIVATION_GRAD_INPUT, ACTIVATION_GRAD_OUTPUT)}
"""Scalars, each with the quantities proportional to it. Gradients of parameters are unscaled when they are read."""

SAME_AS: Final = {OPTIMIZER_RATE: LEARNING_RATE}
"""Another name for a scalar; the optimizer's own rate comes last in a record, and counts."""

VARIES: Final = 0.5
"""Share of the range of sizes so far by which a size beyond it is one more of those that vary by themselves, as numbers
of edges do, and no other sequence or batch."""

SECONDS_MEMORY: Final = 0.05
"""Weight of a step in the average duration of steps."""


class KnownChanges:
    """Follows the scalars by which a training loop describes itself.

    `seconds` is the average duration of a step, `rate_is_zero` says whether the newest learning rate is 0.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self.table = arrays.table
        self.seconds = 1.0
        self.rate_is_zero = False
        self._factor = dict.fromkeys(PROPORTIONAL, 1.0)
        self._declared = arrays.shared(DeclaredChanges)
        self._has_factor = {
            name: arrays.series.column(bool, of=partial(_is_of, quantities))
            for name, quantities in PROPORTIONAL.items()
        }
        self._is_known = arrays.series.column(bool, of=_is_known)
        self._is_input = arrays.series.column(bool, of=lambda s: s.is_model_input)
        self._smallest, self._largest = arrays.series.column(np.float64, np.inf), arrays.series.column(np.float64)
        self._rates, self._step = arrays.shared(RateChanges), -1
        self._normalisations, self._dropouts = Normalisations(arrays), arrays.shared(Dropouts)
        self._pass_of_input = arrays.series.column(np.int64, -1, of=lambda s: s.micro_step if s.is_model_input else -1)
        self._counted = (-1, 0)  # the step, and its micro-steps so far
        self._micro_steps = (math.inf, 0.0)  # the fewest and the most of a step
        self._last: tuple[int, float] | None = None

    @property
    def rate_has_risen(self) -> bool:
        """Whether the last record holds a learning rate that is far above those shortly before."""
        return self._step == self._rates.risen_at

    @property
    def rate(self) -> float:
        """The learning rate, 1 where none is known."""
        return self._factor[LEARNING_RATE]

    def note(self, record: StepRecord) -> bool:
        """Take in the scalars of a record; return whether the user declared a change, or made one on purpose.

        All normalisations may be frozen, or dropout be switched off.
        """
        self._time(record)
        self._rates.note(record)
        self._step, changed = record.step, self._normalisations.are_frozen_by(record, self.table)
        changed |= self._dropouts.are_switched_off_by(record) | self._declared.changes(record)
        for row in rows_where(self._is_known.values[record.where]).tolist():
            name, value = self.table.series[int(record.ids[row])].name, float(record.values[row, VALUE])
            factor = SAME_AS.get(name, name)
            if factor == LEARNING_RATE:
                self.rate_is_zero = value == 0
            if math.isfinite(value) and value > 0:
                self._factor[factor] = value
        return changed

    def is_resized(self, observed: Observed) -> bool:
        """Whether an input of the model is far smaller, or larger, than it ever was: a longer sequence, another batch.

        Or whether a step has other micro-steps than ever: losses that are divided by their number are smaller.
        """
        rows = rows_where(self._is_input.values[observed.record.where])
        ids, numel = observed.record.ids[rows], observed.numel[rows]
        smallest, largest = self._smallest.values[ids], self._largest.values[ids]
        self._smallest.values[ids], self._largest.values[ids] = np.minimum(smallest, numel), np.maximum(largest, numel)
        is_resized = bool(has_left(smallest, largest, numel).any())
        return self._had_other_micro_steps(observed.record) or is_resized

    def _had_other_micro_steps(self, record: StepRecord) -> bool:
        """Whether the step before, which is complete now, had fewer micro-steps or more than any other."""
        (step, count), (fewest, most) = self._counted, self._micro_steps
        newest = 1 + int(self._pass_of_input.values[record.where].max(initial=-1))
        ended = record.step != step and count > 0
        if ended:
            self._micro_steps = min(fewest, count), max(most, count)
        self._counted = record.step, newest if record.step != step else max(count, newest)
        return ended and most > 0 and not fewest <= count <= most

    def divisors(self, record: StepRecord) -> Floats:
        """Return the known factor in the sizes of each row, shape (n,)."""
        divisors = np.ones(len(record))
        for name, column in self._has_factor.items():
            divisors[column.values[record.where]] = self._factor[name]
        return divisors

    def _time(self, record: StepRecord) -> None:
        if self._last is not None and record.step == self._last[0] + 1 and record.time > self._last[1] > 0:
            self.seconds += SECONDS_MEMORY * (record.time - self._last[1] - self.seconds)
        if self._last is None or record.step != self._last[0]:
            self._last = (record.step, record.time)


def has_left(smallest: Floats, largest: Floats, numel: Floats) -> Mask:
    """Return which sizes lie far beyond those of tensors so far, shape (n,) each; none where `largest` is 0 yet."""
    beyond = np.maximum(smallest - numel, numel - largest)
    found: Mask = (largest > 0) & (beyond > 0) & (beyond > VARIES * (largest - smallest))
    return found


def finite_columns(record: StepRecord) -> Floats:
    """Return the statistics, shape (COLUMNS, n); rows that are not finite are NaN."""
    columns: Floats = record.columns
    bad = (columns[NANS] > 0) | (columns[INFS] > 0)
    if bad.any():
        columns = columns.copy()
        columns[:, bad] = np.nan
    return columns


def _is_of(quantities: tuple[str, ...], series: Series) -> bool:
    return series.quantity in quantities


def _is_known(series: Series) -> bool:
    return series.scalar and SAME_AS.get(series.name, series.name) in PROPORTIONAL
