"""Invariant: a parameter with a gradient is updated, and one that was updated so far still is."""

from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import FROZEN
from trainsentry.anomaly.finding import Finding
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_QUANTITIES,
    GRADIENT,
    LEARNING_RATE,
    OPTIMIZER_RATE,
    PARAMETER,
    UPDATE,
    UPDATED_PARAMETERS,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import NORM, VALUE


class CalledModules:
    """Follows the activations of a step."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._number: dict[str, int] = {}
        self._module = np.zeros(0, np.int64)
        self._called = np.zeros(0, bool)
        self._before = np.zeros(0, bool)

    def begin_step(self) -> None:
        """Put the step aside: the next one begins."""
        if self._called.any():
            self._before = self._called.copy()
        self._called[:] = False

    def note(self, record: StepRecord) -> None:
        """Take in the activations of a record."""
        self._refresh()
        modules = self._module[record.where]
        self._called[modules[modules >= 0]] = True

    def knows(self, series: Series) -> bool | None:
        """Return whether the module that owns a series was called; None where nothing was sampled that says so.

        That it was not is only said of a module whose call was seen in the last step whose activations were sampled:
        hooks may be gone. Of a module whose calls are never seen (another one reads its weights) the next one above it
        answers.
        """
        if not self._called.any():
            return None
        name = series.module
        while name not in self._number:
            if not name:
                return None
            name = name.rpartition(".")[0]
        number = self._number[name]
        if self._called[number]:
            return True
        return False if number < len(self._before) and self._before[number] else None

    def _refresh(self) -> None:
        new = self.table.series[len(self._module) :]
        if not new:
            return
        numbers = [
            self._number.setdefault(s.module, len(self._number)) if s.quantity in ACTIVATION_QUANTITIES else -1
            for s in new
        ]
        self._module = np.append(self._module, numbers)
        self._called = np.append(self._called, np.zeros(len(self._number) - len(self._called), bool))


NAME: Final = "frozen"
SCORE: Final = 60.0

MOVED_BEFORE: Final = 10
"""Sampled updates in a row in which a parameter moved, before one without movement counts: in low precision small
updates are rounded away now and then."""

FEW: Final = 16
FEW_STILL: Final = 3
"""Elements below which a tensor must stand still at so many sampled updates in a row: as the sign of what it averages
turns, a number's own update passes zero, and is rounded away at one step in some thousands."""

ABSENT: Final = 2
"""Sampled updates in a row that a parameter is left out of before it counts, where no activation says whether its
module was called."""

LEAST_RATIO: Final = 3e-6
"""Least ‖Δ‖/‖w‖ that counts as a movement: some 25 units in the last place of float32."""

NEVER_MOVED: Final = 0.1
"""Share of the parameters that may never move before that is taken for a design (adapters, a frozen backbone)."""

LOOKS: Final = 10
"""Updates after which what has never moved is looked for, once."""


class FrozenRule:
    """Finds parameters whose update is exactly zero, or is missing, where there was one at every sampled update before.

    A gradient that is exactly zero itself excuses its parameter, and so does a module that was not called (an expert
    that got no token, one of two heads), a step that the loss scaler skipped, or a learning rate of zero.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._called = CalledModules(table)
        self._moved = np.zeros(0, np.int64)
        self._absent = np.zeros(0, np.int64)
        self._still_for = np.zeros(0, np.int64)
        self._numel = np.zeros(0)
        self._since = np.zeros(0, np.int64)
        self._reported = np.zeros(0, bool)
        self._in_step = np.zeros(0, bool)
        self._step = -1
        self._updated = self._excused = False
        self._zero_gradients: set[str] = set()
        self._looks = self._some = 0
        self._ids: dict[str, list[int]] = {}
        self._masks = {quantity: np.zeros(0, bool) for quantity in (UPDATE, GRADIENT)}

    def judge(self, record: StepRecord) -> list[Finding]:
        """Return what stands still; what is missing is known when the next step begins."""
        self._refresh()
        found = []
        if record.step != self._step:
            found = self._missing()
            self._step, self._updated, self._excused = record.step, False, False
            self._in_step[:] = False
            self._called.begin_step()
            self._zero_gradients = set()
        self._excused |= record.skipped or self._rate_is_zero(record)
        self._note_gradients(record)
        self._called.note(record)
        found += self._none_at_all(record)
        rows = np.flatnonzero(self._masks[UPDATE][record.where])
        if len(rows):
            found += self._still(record, rows)
        return found

    def _still(self, record: StepRecord, rows: "np.ndarray[tuple[int], np.dtype[np.intp]]") -> list[Finding]:
        ids, self._updated = record.ids[rows], True
        self._in_step[ids] = True
        if self._excused:
            return []
        still = record.columns[NORM, rows] == 0
        # What moves by a few units in the last place stands still by rounding.
        moves = ~still & ~(record.columns[VALUE, rows] < LEAST_RATIO)
        before = np.where(self._absent[ids] > 0, 0, self._moved[ids])
        self._absent[ids] = 0
        lasts = self._still_for[ids] = np.where(still, self._still_for[ids] + 1, 0)
        least = np.where(self._numel[record.layouts[rows]] < FEW, FEW_STILL, 1)
        self._moved[ids] = np.where(moves, before + 1, np.where(still & (lasts < least), before, 0))
        self._reported[ids[~still]] = False
        found = []
        enough = still & (lasts >= least) & (before >= MOVED_BEFORE)
        for at in np.flatnonzero(enough & ~self._reported[ids]).tolist():
            series_id = int(ids[at])
            if self.table.series[series_id].name not in self._zero_gradients:
                self._reported[series_id] = True
                found.append(_finding(series_id, int(rows[at]), None, record.step))
        return found

    def _none_at_all(self, record: StepRecord) -> list[Finding]:
        """Return that the optimizers took no parameter, where they took some at every sampled update before."""
        found = []
        for row in self._rows_of(record, UPDATED_PARAMETERS).tolist():
            count = record.values[row, VALUE]
            if count > 0:
                self._some += 1
            elif self._some >= MOVED_BEFORE and not self._excused:
                self._some = 0
                found.append(_finding(int(record.ids[row]), row, None, record.step))
        return found

    def _missing(self) -> list[Finding]:
        """Return what the step before lacked."""
        if not self._updated or self._excused:
            return []
        self._looks += 1
        gone = ~self._in_step & self._masks[UPDATE]
        self._since[gone & (self._absent == 0)] = self._step
        self._absent[gone] += 1
        may = np.flatnonzero(gone & (self._moved >= MOVED_BEFORE) & ~self._reported).tolist()
        since = {series_id: int(self._since[series_id]) for series_id in may if self._is_left_out(series_id)}
        found = [_finding(series_id, -1, step, step) for series_id, step in since.items()]
        return found + (self._never_moved() if self._looks == LOOKS else [])

    def _is_left_out(self, series_id: int) -> bool:
        called = self._called.knows(self.table.series[series_id])
        if called is None and self._absent[series_id] < ABSENT:
            return False
        self._moved[series_id] = 0
        self._reported[series_id] = called is not False
        return called is not False

    def _never_moved(self) -> list[Finding]:
        moving = {self.table.series[i].name for i in np.flatnonzero(self._masks[UPDATE]).tolist()}
        parameters = {s.name: i for i, s in self.table.of_quantity(PARAMETER) if s.micro_step == 0}
        still = [i for name, i in parameters.items() if name not in moving]
        if not still or len(still) > NEVER_MOVED * len(parameters):
            return []
        return [_finding(i, -1, self._step, -1) for i in still]

    def _note_gradients(self, record: StepRecord) -> None:
        rows = np.flatnonzero(self._masks[GRADIENT][record.where] & (record.columns[NORM] == 0))
        self._zero_gradients |= {self.table.series[i].name for i in record.ids[rows].tolist()}

    def _rate_is_zero(self, record: StepRecord) -> bool:
        rows = [*self._rows_of(record, LEARNING_RATE), *self._rows_of(record, OPTIMIZER_RATE)]
        return bool((record.values[rows, NORM] == 0).any())

    def _rows_of(self, record: StepRecord, quantity: str) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
        ids = self._ids.get(quantity, [])
        return np.flatnonzero(record.ids == ids[0]) if ids else np.zeros(0, np.intp)

    def _refresh(self) -> None:
        layouts = self.table.layouts[len(self._numel) :]
        if layouts:
            self._numel = np.append(self._numel, [float(layout.numel) for layout in layouts])
        known = len(self._moved)
        new = self.table.series[known:]
        if not new:
            return
        for i, series in enumerate(new, known):
            if series.scalar:
                self._ids.setdefault(series.quantity, []).append(i)
        self._moved = np.append(self._moved, np.zeros(len(new), np.int64))
        self._absent = np.append(self._absent, np.zeros(len(new), np.int64))
        self._still_for = np.append(self._still_for, np.zeros(len(new), np.int64))
        self._since = np.append(self._since, np.zeros(len(new), np.int64))
        self._reported = np.append(self._reported, np.zeros(len(new), bool))
        self._in_step = np.append(self._in_step, np.zeros(len(new), bool))
        for quantity, mask in self._masks.items():
            self._masks[quantity] = np.append(mask, [s.quantity == quantity for s in new])


def _finding(series_id: int, row: int, step: int | None, last_clean: int) -> Finding:
    return Finding(series_id, row, FROZEN, NAME, "norm", 0.0, float("nan"), SCORE, step=step, last_clean=last_clean - 1)
