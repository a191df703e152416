"""A parameter's gradient that is exactly zero and stays so: what it was for is left out of the loss, or masked."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import GRADIENT_FLOW, Anomaly
from trainsentry.anomaly.called_modules import CalledModules
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.gradients.absences import Absences, Bounds
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.scalars.declared_changes import DECLARED, DeclaredChanges
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_QUANTITIES, GRADIENT, Series
from trainsentry.collectors.statistics import NORM

SCORE: Final = 57.0
"""Deviations: above every spike of healthy runs, below a gradient at an output that is lost, which is nearer to the
cause."""

BOUNDS: Final = Bounds(had_before=50, fewest=9, chance=1e-6, faded=0.05)
"""Heads and experts rest as a training begins, and a head may rest for eight samples where no batch has an object of
it. A unit that dies has a last gradient of a few hundredths."""

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
        self._absences = Absences(arrays, BOUNDS)
        self._due: set[int] = set()
        self._step = -1

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the gradients that have been zero for long enough, once for each stretch."""
        record = observed.record
        found: list[Finding] = []
        if record.step < self._step or self._declared.ends_stretch(record):
            self._absences.begin_anew()
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
        self._absences.come(ids[~zero], norms[~zero], record.step)
        if not zero.any() or zero.mean() > MOST:
            return found
        still = ids[zero]
        self._absences.stay_away(still, record.step)
        self._due.update(still[self._absences.are_no_chance(still)].tolist())
        return found

    def _end_step(self, observed: Observed) -> list[Finding]:
        """Judge what is due, in a step that shows which modules were called, or at once where none does."""
        if not self._due or not (self._called.knows_step or not self._called.knows_any):
            return []
        gone = sorted(i for i in self._due if self._absences.is_away(i))
        called = [i for i in gone if not self._called.knows_any or self._is_called(observed.table.series[i])]
        self._due.clear()
        self._absences.tell(np.array(called, np.int64))
        return [self._finding(i) for i in called]

    def _is_called(self, series: Series) -> bool:
        return self._called.was_called(series) is True

    def _finding(self, series_id: int) -> Finding:
        since, newest = self._absences.steps(series_id)
        return Finding(series_id, -1, GRADIENT_FLOW, self.name, "norm", 0.0, 1.0, SCORE, step=since, last_clean=newest)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return since when the gradient is zero."""
        return (
            f"{subject} is exactly zero at each step since step {anomaly.step}, and was not before: what it is for is "
            "left out of the loss, or masked"
        )
