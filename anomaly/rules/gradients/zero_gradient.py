"""A parameter's gradient that is exactly zero and stays so: what it was for is left out of the loss, or masked."""

import math
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import GRADIENT_FLOW, Anomaly
from trainsentry.anomaly.called_modules import CalledModules
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.scalars.declared_changes import DECLARED, DeclaredChanges
from trainsentry.anomaly.series_arrays import Floats, Integers, SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_QUANTITIES, GRADIENT, Series
from trainsentry.collectors.statistics import NORM

SCORE: Final = 57.0
"""Deviations: above every spike of healthy runs, below a gradient at an output that is lost, which is nearer to the
cause."""

HAD_BEFORE: Final = 50
"""Samples that must have had a gradient: heads and experts rest as a training begins."""

FEWEST: Final = 9
"""Samples in a row without one, however many had it: a head may rest for eight, where no batch has an object of it."""

LONGER: Final = 3
"""The same as a multiple of the longest such rest so far: tasks may come in blocks."""

CHANCE: Final = 1e-6
"""Probability below which samples in a row are no chance; the share of zeros is taken by the rule of succession
(Laplace, 1814)."""

RECENT: Final = 8
FADED: Final = 0.05
"""Newest gradients that are remembered, and the share of their middle norm below which the last one had faded: a unit
that dies, or a weight that a schedule takes to zero, tells by its fall."""

MOST: Final = 0.5
"""Share of a step's gradients from which they are zero together: the loss is zero, or cut."""


class ZeroGradientRule(Rule):
    """Counts for how many samples in a row each parameter's gradient has been exactly zero.

    Where decay or momentum go on, its updates are not zero and say nothing. A module that is called no more rests by
    right: the next step that shows which are called decides. A declared change begins anew.
    """

    name: ClassVar[str] = "zero_gradient"
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT, *DECLARED}) | ACTIVATION_QUANTITIES
    statistics: ClassVar[frozenset[str]] = frozenset({"norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        series = arrays.series
        self._declared, self._called = arrays.shared(DeclaredChanges), CalledModules(arrays)
        self._is_gradient = series.column(bool, of=lambda s: s.quantity == GRADIENT and not s.micro_step)
        self._had, self._had_not = series.column(np.int64), series.column(np.int64)
        self._gone, self._longest = series.column(np.int64), series.column(np.int64)
        self._since, self._before = series.column(np.int64, -1), series.column(np.int64, -1)
        self._norms = series.column(np.float64, np.nan, shape=(RECENT,))
        self._told = series.column(bool)
        self._due: set[int] = set()
        self._step = -1

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the gradients that have been zero for long enough, once for each stretch."""
        record = observed.record
        found: list[Finding] = []
        if record.step < self._step or self._declared.ends_stretch(record):
            for column in (self._had, self._had_not, self._gone, self._longest):
                column.values[:] = 0
            self._told.values[:] = False
            self._due.clear()
        if record.step != self._step:
            found = self._end_step(observed)
            self._called.begin_step()
            self._step = record.step
        self._called.note(record)
        rows = rows_where(self._is_gradient.values[record.where] & ~observed.excused)
        if not len(rows) or record.skipped:
            return found
        ids, norms = record.ids[rows].astype(np.int64), record.columns[NORM, rows]
        zero = norms == 0
        self._take_in(ids[~zero], norms[~zero])
        if not zero.any() or zero.mean() > MOST:
            return found
        still = ids[zero]
        begins = still[self._gone.values[still] == 0]
        self._since.values[begins] = record.step
        self._gone.values[still] += 1
        self._due.update(still[self._are_gone(still)].tolist())
        return found

    def _end_step(self, observed: Observed) -> list[Finding]:
        """Judge what is due, in a step that shows which modules were called, or at once where none does."""
        if not self._due or not (self._called.knows_step or not self._called.knows_any):
            return []
        gone = sorted(i for i in self._due if self._gone.values[i])
        called = [i for i in gone if not self._called.knows_any or self._is_called(observed.table.series[i])]
        self._due.clear()
        self._told.values[called] = True
        return [self._finding(i) for i in called]

    def _is_called(self, series: Series) -> bool:
        return self._called.was_called(series) is True

    def _take_in(self, ids: Integers, norms: Floats) -> None:
        """Take in gradients that are not zero."""
        gone = self._gone.values[ids]
        self._longest.values[ids] = np.maximum(self._longest.values[ids], gone)
        self._had_not.values[ids] += gone
        self._norms.values[self._had.values[ids] % RECENT, ids] = norms
        self._had.values[ids] += 1
        self._gone.values[ids] = 0
        self._before.values[ids] = self._step
        self._told.values[ids] = False

    def _are_gone(self, ids: Integers) -> Integers:
        """Return which gradients have been zero for longer than chance makes them."""
        had, had_not, gone = self._had.values[ids], self._had_not.values[ids], self._gone.values[ids]
        share = (had_not + 1) / (had + had_not + 2)
        enough = gone >= np.maximum(FEWEST, LONGER * self._longest.values[ids])
        enough &= (gone * np.log(share) < math.log(CHANCE)) & (had >= HAD_BEFORE) & ~self._told.values[ids]
        places = rows_where(enough)
        if not len(places):
            return places
        norms = self._norms.values[:, ids[places]]
        last = norms[(had[places] - 1) % RECENT, np.arange(len(places))]
        left: Integers = places[last >= FADED * np.median(norms, axis=0)]
        return left

    def _finding(self, series_id: int) -> Finding:
        since, before = int(self._since.values[series_id]), int(self._before.values[series_id])
        return Finding(series_id, -1, GRADIENT_FLOW, self.name, "norm", 0.0, 1.0, SCORE, step=since, last_clean=before)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return since when the gradient is zero."""
        return (
            f"{subject} is exactly zero at each step since step {anomaly.step}, and was not before: what it is for is "
            "left out of the loss, or masked"
        )
