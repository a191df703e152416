"""A parameter with a gradient whose update is zero or missing."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.anomaly import FROZEN, UNUSED, Anomaly
from trainsentry.anomaly.called_modules import CalledModules
from trainsentry.anomaly.finding import ALL, Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    ACTIVATION_QUANTITIES,
    GRADIENT,
    KEPT,
    LEARNING_RATE,
    MADE_CONSTANT,
    MOST_FROZEN,
    OPTIMIZER_RATE,
    OUTSIDE_WRITES,
    PARAMETER,
    REPLACED,
    UNHELD,
    UNHELD_UPDATES,
    UNWRITTEN,
    UPDATE,
    UPDATED_PARAMETERS,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import NORM, VALUE

Rows = npt.NDArray[np.intp]

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs; an exact zero is no noise."""

MOVED_BEFORE: Final = 10
"""Sampled updates in a row in which a parameter moved, before one without movement counts: in low precision small
updates are rounded away now and then."""

MISSING_AFTER: Final = 5
"""Sampled updates in a row with a parameter, before its absence counts: rounding makes no update absent."""

FEW_ELEMENTS: Final = 16
FEW_ELEMENTS_STILL_FOR: Final = 3
"""A tensor of fewer than 16 elements must stand still at three sampled updates in a row: its optimizer's average of the
gradient changes sign at one step in some thousands, and the update is then rounded away."""

ABSENT_FOR: Final = 2
ABSENT_FOR_WHERE_SOME_REST: Final = 8
"""Sampled updates in a row without a parameter, before it counts, where no activation shows whether its module was
called; the second in a model that leaves out modules now and then and takes them in again, as LayerDrop does (Fan et
al., "Reducing Transformer depth on demand", ICLR 2020: up to a half of the layers at a step)."""

DROP: Final = 0.5
"""Share of the learning rate of the step before, below which it has dropped: schedules that glide fall by less."""

REQUIRES_GRAD: Final = "requires_grad"
"""The statistic of a parameter that was frozen by that attribute."""

NO_GRADIENT: Final = "no_gradient"
"""The statistic of a parameter that has had neither a gradient nor an update."""

HELD: Final = "held"
IN_MODEL: Final = "in_model"
"""The statistics of a parameter that has a gradient and that no optimizer holds, and of one that an optimizer holds in
place of the model's."""

LEAST_RATIO: Final = 3e-6
"""Least ‖Δ‖/‖w‖ of a movement: some 25 units in the last place of float32."""

NEVER_MOVED: Final = 0.1
"""Largest share of parameters that never moved and are reported: more of them are a design (adapters, a frozen
backbone)."""

NEVER_MOVED_AFTER: Final = 10
"""Sampled updates after which the rule looks, once, for parameters that never moved, and steps with gradients after
which it looks for those that had neither gradient nor update: gradients are sampled more often."""


_PASSES: Final = frozenset({ACTIVATION_INPUT, ACTIVATION_OUTPUT, ACTIVATION_GRAD_OUTPUT})

LONGER: Final = 10
"""Factor on that number of steps where no activation shows which modules were called: experts wait for tokens."""


class FrozenRule(Rule):
    """Finds parameters whose update is exactly zero or missing, where every sampled update before moved them.

    Between samples the collector tells of weights that an update did not write to; where it was right to leave them, it
    has told nothing.

    Excuses: a gradient that is exactly zero, a module that was not called (an expert without a token, one of two
    heads), a step that the loss scaler skipped, a learning rate of zero. After a learning rate has dropped, parameters
    must have moved by the new one: what moved by a few units in the last place may be rounded away.
    """

    name: ClassVar[str] = "frozen"
    speaks_for: ClassVar[str | None] = FROZEN
    quantities: ClassVar[frozenset[str]] = (
        frozenset({GRADIENT, PARAMETER, UPDATE, UPDATED_PARAMETERS, UNWRITTEN, LEARNING_RATE, OPTIMIZER_RATE})
        | ACTIVATION_QUANTITIES
    )
    statistics: ClassVar[frozenset[str]] = frozenset({"norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._numel = arrays.numel
        self._called = CalledModules(arrays)
        self._is_update = arrays.series.column(bool, of=lambda s: s.quantity == UPDATE)
        self._is_parameter = arrays.series.column(bool, of=lambda s: s.quantity == PARAMETER and not s.micro_step)
        self._is_gradient = arrays.series.column(bool, of=lambda s: s.quantity == GRADIENT)
        self._is_unwritten = arrays.series.column(bool, of=lambda s: s.scalar and s.name.partition(".")[0] == UNWRITTEN)
        self._moved = arrays.series.column(np.int64)
        self._absent = arrays.series.column(np.int64)
        self._absent_since = arrays.series.column(np.int64)
        self._still_for = arrays.series.column(np.int64)
        self._reported = arrays.series.column(bool)
        self._seen = arrays.series.column(bool)  # parameters, updates and gradients that have had a row
        self._in_step = arrays.series.column(bool)
        self._without_since = arrays.series.column(np.int64, -1)  # of gradients that are missing
        self._updated_at = arrays.series.column(np.int64, -1)
        self._gradient_of: dict[str, int] = {}
        self._scalars: dict[str, int] = {}
        arrays.series.before_growth(self._note_new)
        self._step = -1
        self._updated = self._excused = False
        self._zero_gradients: set[str] = set()
        self._rate = 0.0
        self._updates = self._nonempty_updates = self._graded_steps = 0
        self._graded = False
        self._never: set[int] = set()
        self._constants: set[str] = set()
        self._passes = arrays.series.column(bool, of=lambda s: s.quantity in _PASSES)
        self._outputs: defaultdict[str, set[int]] = defaultdict(set)
        self._given: defaultdict[int, set[str]] = defaultdict(set)
        self._with_gradient: set[str] = set()
        self._noted: set[int] = set()  # steps whose outputs were, where gradients may never come
        self._some_rest = self._most_frozen = False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the frozen parameters; a missing update is known when the next step begins."""
        record = observed.record
        found = []
        if record.step < self._step:  # the run went back
            self._updated_at.values[:] = self._without_since.values[:] = -1
        if record.step != self._step:
            self._note_missing_gradients()
            found = self._missing(observed.table)
            self._step, self._updated, self._excused, self._graded = record.step, False, False, False
            self._in_step.values[:] = False
            self._called.begin_step()
            self._zero_gradients = set()
        self._excused |= record.skipped or self._note_rate(record)
        # Averages are swapped in for a pass that learns nothing.
        self._excused |= bool(len(self._rows_of(record, OUTSIDE_WRITES)))
        self._note_gradients(observed)
        self._note_empty(observed)
        self._called.note(record)
        self._note_outputs(observed)
        found += self._empty_update(record) + self._unwritten(observed)
        rows = rows_where(self._is_update.values[record.where])
        if len(rows):
            found += self._still(observed, rows)
        return found

    def _still(self, observed: Observed, rows: Rows) -> list[Finding]:
        """Return the parameters among the rows of updates that stand still."""
        record = observed.record
        ids, self._updated = record.ids[rows], True
        moved, still_for, reported = self._moved.values, self._still_for.values, self._reported.values
        self._in_step.values[ids] = self._seen.values[ids] = True
        self._updated_at.values[ids] = record.step
        if self._excused:
            return []
        still = record.columns[NORM, rows] == 0
        # An update of a few units in the last place may round to zero next time.
        moves = ~still & ~(record.columns[VALUE, rows] < LEAST_RATIO)
        before = np.where(self._absent.values[ids] > 0, 0, moved[ids])
        self._some_rest |= bool(self._absent.values[ids].any())
        self._absent.values[ids] = 0
        lasts = still_for[ids] = np.where(still, still_for[ids] + 1, 0)
        least = np.where(self._numel.values[record.layouts[rows]] < FEW_ELEMENTS, FEW_ELEMENTS_STILL_FOR, 1)
        moved[ids] = np.where(moves, before + 1, np.where(still & (lasts < least), before, 0))
        reported[ids[~still]] = False
        found = []
        counts = still & (lasts >= least) & (before >= MOVED_BEFORE) & ~reported[ids]
        for i in rows_where(counts).tolist():
            series_id = int(ids[i])
            if observed.table.series[series_id].name not in self._zero_gradients:
                reported[series_id] = True
                found.append(_finding(series_id, int(rows[i]), None, record.step - 1))
        return found

    def _empty_update(self, record: StepRecord) -> list[Finding]:
        """Return a finding where the optimizers update no parameter and did at every sampled update before."""
        found = []
        for row in self._rows_of(record, UPDATED_PARAMETERS).tolist():
            if record.values[row, VALUE] > 0:
                self._nonempty_updates += 1
            elif self._nonempty_updates >= MOVED_BEFORE and not self._excused:
                self._nonempty_updates = 0
                found.append(_finding(int(record.ids[row]), row, None, record.step - 1))
        return found

    def _unwritten(self, observed: Observed) -> list[Finding]:
        """Return the parameters that an update did not write to."""
        record = observed.record
        found = []
        for row in rows_where(self._is_unwritten.values[record.where]).tolist():
            series_id, value = int(record.ids[row]), record.values[row, VALUE]
            name = observed.table.series[series_id].name.partition(".")[2] or ALL
            if value == MADE_CONSTANT:
                self._constants.add(name)
            if value == MOST_FROZEN:  # a backbone, on purpose
                self._most_frozen = True
            if value in {MADE_CONSTANT, MOST_FROZEN} or (self._excused and value not in {UNHELD, REPLACED}):
                continue
            statistic = {KEPT: "norm", UNHELD: HELD, REPLACED: IN_MODEL}.get(value, REQUIRES_GRAD)
            step = max(record.step - (UNHELD_UPDATES if value == UNHELD else 0), 0)
            found.append(_finding(series_id, row, step, step - 1, name=name, statistic=statistic))
        return found

    def _missing(self, table: SeriesTable) -> list[Finding]:
        """Return the parameters whose update was missing in the step before."""
        never = self._without_gradient(table)
        if not self._updated or self._excused:
            return never
        self._updates += 1
        absent, reported = self._absent.values, self._reported.values
        gone = ~self._in_step.values & self._is_update.values & self._seen.values
        if gone.any():  # a loop may update a parameter fewer times in a step
            updated = {table.series[i].name for i in rows_where(self._in_step.values & self._is_update.values).tolist()}
            gone[[i for i in rows_where(gone).tolist() if table.series[i].name in updated]] = False
        if self._most_frozen:
            self._most_frozen, self._moved.values[gone] = False, 0
        self._absent_since.values[gone & (absent == 0)] = self._step
        absent[gone] += 1
        candidates = rows_where(gone & (self._moved.values >= MISSING_AFTER) & ~reported).tolist()
        since = {i: self._since(i, table.series[i].name) for i in candidates if self._counts(i, table.series[i])}
        # Where the backward pass is cut, what comes before the cut stops too: the module nearest to it is the last.
        places = {module: place for place, module in enumerate(table.series[i].module for i in since)}
        order = sorted(since, key=lambda i: -places[table.series[i].module])  # stable: weights stay ahead of biases
        found = [*never, *(_finding(i, -1, *since[i]) for i in order)]
        if self._updates != NEVER_MOVED_AFTER:
            return found
        moving = {table.series[i].name for i in rows_where(self._is_update.values & self._seen.values).tolist()}
        return found + self._never_moved(table, moving)

    def _since(self, series_id: int, name: str) -> tuple[int, int]:
        """Return since when an update is missing, and when it was not: gradients may be sampled more often."""
        absent, gradient = int(self._absent_since.values[series_id]), self._gradient_of.get(name, -1)
        clean = int(self._updated_at.values[series_id])
        without = int(self._without_since.values[gradient]) if gradient >= 0 else -1
        return (without, without - 1) if clean < without <= absent else (absent, clean)

    def _note_missing_gradients(self) -> None:
        """Note since which step gradients are missing that the run has had, where others were sampled."""
        if not self._graded:
            return
        since, in_step = self._without_since.values, self._in_step.values
        since[(since < 0) & self._is_gradient.values & self._seen.values & ~in_step] = self._step
        since[self._is_gradient.values & in_step] = -1

    def _without_gradient(self, table: SeriesTable) -> list[Finding]:
        """Return, once, the parameters that have had neither a gradient nor an update."""
        self._graded_steps += self._graded and not self._excused
        after = NEVER_MOVED_AFTER if self._called.knows_any else LONGER * NEVER_MOVED_AFTER
        if not self._graded or self._excused or self._graded_steps != after:
            return []
        known = rows_where((self._is_update.values | self._is_gradient.values) & self._seen.values)
        if not self._is_update.values[known].any():
            return []
        return self._never_moved(table, {table.series[i].name for i in known.tolist()}, NO_GRADIENT)

    def _counts(self, series_id: int, series: Series) -> bool:
        """Return whether a missing update counts: its module was called, or the update is missing for long enough."""
        called = self._called.was_called(series)
        least = ABSENT_FOR_WHERE_SOME_REST if self._some_rest else ABSENT_FOR
        if called is None and self._absent.values[series_id] < least:
            return False
        self._moved.values[series_id] = 0
        self._reported.values[series_id] = called is not False
        return called is not False

    def _is_unused(self, module: str) -> bool:
        """Whether no gradient came to a module's output, which no module with a gradient was given."""
        given = {to for bits in self._outputs.get(module, ()) for to in self._given.get(bits, ())}
        return bool(self._with_gradient) and module in self._outputs and not (given | {module}) & self._with_gradient

    def _note_outputs(self, observed: Observed) -> None:
        """Note, until parameters that never moved are told of, what modules gave and were given, by its bits."""
        record, series = observed.record, observed.table.series
        if self._graded_steps >= NEVER_MOVED_AFTER or len(self._noted) > LONGER * NEVER_MOVED_AFTER:
            return
        rows = rows_where(self._passes.values[record.where] & (record.columns[NORM] != 0))
        if len(rows):
            self._noted.add(record.step)
        for i, bits in zip(record.ids[rows].tolist(), record.prints[rows].tolist(), strict=True):
            if series[i].quantity == ACTIVATION_GRAD_OUTPUT:
                self._with_gradient.add(series[i].module)
            elif series[i].quantity == ACTIVATION_OUTPUT:
                self._outputs[series[i].module].add(bits)
            else:
                self._given[bits].add(series[i].module)

    def _never_moved(self, table: SeriesTable, moving: set[str], statistic: str = "norm") -> list[Finding]:
        """Return the parameters that are not among the moving ones, where they are few; each is reported once."""
        known = rows_where(self._is_parameter.values & self._seen.values)  # series are defined ahead of their rows
        parameters = {table.series[i].name: i for i in known.tolist()}
        moves = moving | self._constants
        still = [i for name, i in parameters.items() if name not in moves and self._called.ever(table.series[i])]
        if len(still) > NEVER_MOVED * len(parameters):
            return []
        is_given = statistic == NO_GRADIENT
        statistics = {i: UNUSED if is_given and self._is_unused(table.series[i].module) else statistic for i in still}
        found = [_finding(i, -1, self._step, -2, statistic=statistics[i]) for i in still if i not in self._never]
        self._never.update(still)
        return found

    def _note_gradients(self, observed: Observed) -> None:
        record = observed.record
        gradients = self._is_gradient.values[record.where]
        self._seen.values[record.ids[self._is_parameter.values[record.where]]] = True
        self._graded |= bool(gradients.any())
        self._seen.values[record.ids[gradients]] = self._in_step.values[record.ids[gradients]] = True
        rows = rows_where(gradients & (record.columns[NORM] == 0))
        self._zero_gradients |= {observed.table.series[i].name for i in record.ids[rows].tolist()}

    def _note_empty(self, observed: Observed) -> None:
        """Take tensors without elements for constants: nothing of them can move."""
        for row in rows_where(observed.numel == 0).tolist():
            self._constants.add(observed.table.series[observed.record.ids[row]].name)

    def _note_rate(self, record: StepRecord) -> bool:
        """Take in the learning rate; return whether it is zero."""
        rates = record.values[[*self._rows_of(record, LEARNING_RATE), *self._rows_of(record, OPTIMIZER_RATE)], NORM]
        if len(rates):
            if rates.max() < DROP * self._rate:
                self._moved.values[:] = 0
            self._rate = float(rates.max())
        return bool((rates == 0).any())

    def _rows_of(self, record: StepRecord, quantity: str) -> Rows:
        series_id = self._scalars.get(quantity)
        return np.zeros(0, np.intp) if series_id is None else rows_where(record.ids == series_id)

    def _note_new(self, first: int, new: Sequence[Series]) -> None:
        for i, series in enumerate(new, first):
            if series.scalar:
                self._scalars.setdefault(series.quantity, i)
            elif series.quantity == GRADIENT and not series.micro_step:
                self._gradient_of.setdefault(series.name, i)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return that the update is zero or missing, and at which step."""
        if anomaly.name == ALL:
            return f"the optimizer updates no parameter at step {anomaly.step}"
        if anomaly.statistic in _OUTSIDE:
            return f"parameter {anomaly.name} {_OUTSIDE[anomaly.statistic].format(anomaly.step)}"
        if anomaly.last_clean < 0:
            if anomaly.statistic == UNUSED:
                module = anomaly.name.rpartition(".")[0]
                return (
                    f"parameter {anomaly.name} has never moved up to step {anomaly.step}: {module} is called, but no "
                    "gradient comes to what it gives, which is not used, or detached"
                )
            why = ": no gradient comes to it, or no optimizer holds it" if anomaly.statistic == NO_GRADIENT else ""
            return f"parameter {anomaly.name} has never moved up to step {anomaly.step}, although most others move{why}"
        if math.isnan(anomaly.value):
            reason = "although others were updated: no gradient reaches it, or no optimizer holds it any more"
            return f"{subject} is missing at step {anomaly.step}, {reason}"
        return f"{subject} is zero at step {anomaly.step}, although it has a gradient and a non-zero learning rate"


_OUTSIDE: Final = {
    REQUIRES_GRAD: "requires no gradient any more at step {}, and is not updated",
    IN_MODEL: "of the model was replaced at step {}, and its optimizer still holds the old one",
    HELD: "has had a gradient since step {}, but no optimizer holds it: it is never updated",
}
"""What is said of a parameter that no optimizer updates, by the statistic."""


def _finding(
    series_id: int, row: int, step: int | None, last_clean: int, *, name: str | None = None, statistic: str = "norm"
) -> Finding:
    detail = (FROZEN, FrozenRule.name, statistic, 0.0 if row >= 0 else float("nan"), float("nan"), SCORE)
    return Finding(series_id, row, *detail, step=step, last_clean=last_clean, name=name, quantity=UPDATE)
