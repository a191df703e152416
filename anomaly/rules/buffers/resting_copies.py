"""A copy of weights that was kept up to date and stands still, whose writes are not counted, as those to `.data`."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import STALE, Anomaly
from trainsentry.anomaly.called_modules import CalledModules
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_QUANTITIES,
    BUFFER,
    GRADIENT,
    GRADIENT_UNREDUCED,
    PARAMETER,
    STOPPED_WRITES,
    UPDATE,
    Series,
)
from trainsentry.collectors.statistics import NORM, STATISTICS

SCORE: Final = 58.0
"""Deviations: above every spike of healthy runs, below a count of writes."""

VARIED: Final = 16
"""Samples at which a copy must have moved: a teacher that is loaded once or twice is not kept up to date."""

RESTS_STEPS: Final = 200
RESTS_SAMPLES: Final = 8
"""Steps and samples for which a copy stands still before it is told, as long as one whose writes are counted."""

LONGER: Final = 10
"""The same in samples, as a multiple of its longest rest: some averages are taken every hundred updates."""


MATRIX: Final = 2
"""Dimensions from which on a buffer of a weight's shape is its copy; vectors are running statistics."""


class RestingCopiesRule(Rule):
    """Compares the samples of weights that have neither a gradient nor an update, while other weights move.

    A buffer that has the shape of a weight, of two or more dimensions, and its last name is a copy too, as some
    libraries keep targets. Targets, teachers and averages of weights are such copies. One of a module that is called no
    more rests by right, and what `stopped_writes` tells of is told once.
    """

    name: ClassVar[str] = "resting_copies"
    quantities: ClassVar[frozenset[str]] = (
        frozenset({PARAMETER, BUFFER, GRADIENT, GRADIENT_UNREDUCED, UPDATE, STOPPED_WRITES}) | ACTIVATION_QUANTITIES
    )
    statistics: ClassVar[frozenset[str]] = frozenset(STATISTICS)

    def __init__(self, arrays: SeriesArrays) -> None:
        series = arrays.series
        self._called = CalledModules(arrays)
        self._is_weight = series.column(bool, of=lambda s: s.quantity == PARAMETER and not s.micro_step)
        self._is_buffer = series.column(bool, of=lambda s: s.quantity == BUFFER and not s.micro_step)
        self._is_of_matrix = arrays.layouts.column(bool, of=lambda layout: len(layout.shape) >= MATRIX)
        self._is_of_weight = arrays.layouts.column(bool)
        self._learns = series.column(bool, of=lambda s: s.quantity in {GRADIENT, GRADIENT_UNREDUCED, UPDATE})
        prefix = f"{STOPPED_WRITES}."
        self._is_count = series.column(bool, of=lambda s: s.scalar and s.name.startswith(prefix))
        self._last, self._varied = series.column(np.int64), series.column(np.int32)
        self._rests, self._longest = series.column(np.int32), series.column(np.int32)
        self._since, self._told = series.column(np.int64, -1), series.column(bool)
        self._others: set[str] = set()
        self._leaves: set[str] = set()
        self._series = arrays.table.series
        series.before_growth(lambda _, new: self._leaves.update(_leaf(s) for s in new if s.quantity == PARAMETER))
        self._checked = series.column(bool)
        self._due: list[int] = []
        self._step = -1

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the copies that stand still, when the step that shows their modules' calls has ended."""
        record, table, found = observed.record, observed.table, []
        if record.step != self._step:
            if self._due and self._called.knows_step:
                found = [self._finding(i) for i in self._due if self._may_be_used(table.series[i])]
                self._due.clear()
            self._called.begin_step()
            self._step = record.step
        self._called.note(record)
        self._note_others(observed)
        rows = rows_where(self._are_weights(record) & (record.columns[NORM] > 0))
        if len(rows) and self._others:
            ids = record.ids[rows].astype(np.int64)
            moved = self._follow(ids, record.prints[rows], record.step)
            if (moved & self._is_weight.values[ids]).any():  # the training goes on
                self._due += [i for i in self._resting(ids, record.step) if table.series[i].name not in self._others]
        return found

    def _are_weights(self, record: StepRecord) -> Mask:
        """Return which rows are of weights, or of buffers that look like their copies, shape (n,)."""
        is_weight, is_matrix = self._is_weight.values[record.where], self._is_of_matrix.values[record.layouts]
        self._is_of_weight.values[record.layouts[is_weight & is_matrix]] = True
        is_copy = self._is_buffer.values[record.where] & self._is_of_weight.values[record.layouts]
        for row in rows_where(is_copy).tolist():
            is_copy[row] = _leaf(self._series[record.ids[row]]) in self._leaves
        return np.asarray(is_weight | is_copy, bool)

    def _note_others(self, observed: Observed) -> None:
        """Note which weights learn, and those whose counts of writes tell of them."""
        where, ids = observed.record.where, observed.record.ids
        new = ids[(self._learns.values[where] | self._is_count.values[where]) & ~self._checked.values[where]]
        self._checked.values[new] = True
        names = (observed.table.series[i].name for i in new.tolist())
        self._others.update(name.removeprefix(f"{STOPPED_WRITES}.") for name in names)

    def _follow(self, ids: Integers, prints: Integers, step: int) -> Mask:
        """Take in the samples of weights; return which have moved."""
        same: Mask = prints == self._last.values[ids]
        rests, longest = self._rests.values, self._longest.values
        moved = ids[~same]
        longest[moved] = np.maximum(longest[moved], np.where(self._told.values[moved], 0, rests[moved]))
        rests[moved], self._told.values[moved] = 0, False
        self._varied.values[moved] += 1
        begins = ids[same & (rests[ids] == 0)]
        self._since.values[begins] = step
        rests[ids[same]] += 1
        self._last.values[ids] = prints
        return ~same

    def _resting(self, ids: Integers, step: int) -> list[int]:
        """Return the weights that have stood still for long enough, once for each rest."""
        rests, since = self._rests.values[ids], self._since.values[ids]
        enough = (rests >= np.maximum(RESTS_SAMPLES, LONGER * self._longest.values[ids])) & (
            step - since >= RESTS_STEPS
        )
        due = ids[enough & (self._varied.values[ids] >= VARIED) & ~self._told.values[ids]]
        self._told.values[due] = True
        return [int(i) for i in due]

    def _may_be_used(self, series: Series) -> bool:
        return self._called.was_called(series) is True or self._called.never(series)

    def _finding(self, series_id: int) -> Finding:
        since = int(self._since.values[series_id])
        where = {"step": since, "last_clean": since - 1, "passed_on": False}
        return Finding(series_id, -1, STALE, self.name, "stopped", 0.0, 1.0, SCORE, **where)  # type: ignore[arg-type]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return since when the copy stands still."""
        return (
            f"{subject} is exactly the same at each sample since step {anomaly.step}, while others are trained: it "
            "was kept up to date until then, and is so no more"
        )


def _leaf(series: Series) -> str:
    return series.name.rpartition(".")[2]
