"""Invariant: what has a gradient is updated, and what was updated so far still is."""

from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import FROZEN
from trainsentry.anomaly.finding import Finding
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import GRADIENT, PARAMETER, UPDATE, UPDATED_PARAMETERS, SeriesTable
from trainsentry.collectors.statistics import NORM, VALUE

NAME: Final = "frozen"
SCORE: Final = 60.0

MOVED_BEFORE: Final = 10
"""Sampled updates in a row in which a parameter moved, before one without movement counts: in low precision small
updates are rounded away now and then."""

LEAST_RATIO: Final = 3e-6
"""Least ‖Δ‖/‖w‖ that counts as a movement: some 25 units in the last place of float32."""

NEVER_MOVED: Final = 0.1
"""Share of the parameters that may never move before that is taken for a design (adapters, a frozen backbone)."""

LOOKS: Final = 10
"""Updates after which what has never moved is looked for, once."""


class FrozenRule:
    """Finds parameters whose update is exactly zero, or is missing, where there was one at every sampled update before.

    A gradient that is exactly zero itself excuses its parameter, and so does a step that the loss scaler skipped, or a
    learning rate of zero.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._moved: dict[int, int] = {}
        self._reported: set[int] = set()
        self._step = -1
        self._in_step: set[int] = set()
        self._zero_gradients: set[str] = set()
        self._excused = False
        self._order = 0
        self._looks = self._some = 0
        self._ids: dict[str, list[int]] = {}
        self._known = 0

    def judge(self, record: StepRecord) -> list[Finding]:
        """Return what stands still; what is missing is known when the next step begins."""
        self._refresh()
        found = []
        if record.step != self._step:
            found = self._missing()
            self._step, self._in_step, self._excused = record.step, set(), False
            self._zero_gradients = set()
        self._excused |= record.skipped or self._rate_is_zero(record)
        found += self._none_at_all(record)
        updates = self._mask(UPDATE)[record.ids]
        if not updates.any():
            self._note_gradients(record)
            return found
        self._note_gradients(record)
        rows = np.flatnonzero(updates)
        still = record.values[rows, NORM] == 0
        for row, series_id in zip(rows.tolist(), record.ids[rows].tolist(), strict=True):
            self._in_step.add(series_id)
            self._order = max(self._order, record.first_order + row)
        if self._excused:
            return found
        ids = record.ids[rows]
        ratios = record.values[rows, VALUE]
        for series_id, ratio in zip(ids[~still].tolist(), ratios[~still].tolist(), strict=True):
            # What moves by a few units in the last place stands still by rounding.
            self._moved[series_id] = 0 if ratio < LEAST_RATIO else self._moved.get(series_id, 0) + 1
            self._reported.discard(series_id)
        for row, series_id in zip(rows[still].tolist(), ids[still].tolist(), strict=True):
            name = self.table.series[series_id].name
            moved, self._moved[series_id] = self._moved.get(series_id, 0), 0
            if moved >= MOVED_BEFORE and name not in self._zero_gradients and series_id not in self._reported:
                self._reported.add(series_id)
                found.append(_finding(series_id, row, None, record.step))
        return found

    def _none_at_all(self, record: StepRecord) -> list[Finding]:
        """Return that the optimizers took no parameter, where they took some at every sampled update before."""
        found = []
        for row in np.flatnonzero(np.isin(record.ids, self._ids.get(UPDATED_PARAMETERS, []))).tolist():
            count = record.values[row, VALUE]
            if count > 0:
                self._some += 1
            elif self._some >= MOVED_BEFORE and not self._excused:
                self._some = 0
                found.append(_finding(int(record.ids[row]), row, None, record.step))
        return found

    def _missing(self) -> list[Finding]:
        """Return what the step before lacked."""
        if not self._in_step or self._excused:
            return []
        self._looks += 1
        found = []
        for series_id, moved in self._moved.items():
            if series_id not in self._in_step and moved >= MOVED_BEFORE and series_id not in self._reported:
                self._reported.add(series_id)
                self._moved[series_id] = 0
                found.append(_finding(series_id, -1, self._step, self._step))
        return found + (self._never_moved() if self._looks == LOOKS else [])

    def _never_moved(self) -> list[Finding]:
        moving = {self.table.series[i].name for i in self._moved}
        parameters = {s.name: i for i, s in self.table.of_quantity(PARAMETER) if s.micro_step == 0}
        still = [i for name, i in parameters.items() if name not in moving]
        if not still or len(still) > NEVER_MOVED * len(parameters):
            return []
        return [_finding(i, -1, self._step, -1) for i in still]

    def _note_gradients(self, record: StepRecord) -> None:
        rows = np.flatnonzero(self._mask(GRADIENT)[record.ids] & (record.values[:, NORM] == 0))
        self._zero_gradients |= {self.table.series[i].name for i in record.ids[rows].tolist()}

    def _rate_is_zero(self, record: StepRecord) -> bool:
        rates = self._ids.get("learning_rate", [])
        return bool(rates) and bool((record.values[np.isin(record.ids, rates), NORM] == 0).any())

    def _mask(self, quantity: str) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        return self._masks[quantity]

    def _refresh(self) -> None:
        if self._known == len(self.table.series):
            return
        for i, series in enumerate(self.table.series[self._known :], self._known):
            self._ids.setdefault(series.quantity, []).append(i)
        self._known = len(self.table.series)
        self._masks = {q: np.zeros(self._known, bool) for q in (UPDATE, GRADIENT)}
        for quantity, mask in self._masks.items():
            mask[self._ids.get(quantity, [])] = True


def _finding(series_id: int, row: int, step: int | None, last_clean: int) -> Finding:
    return Finding(series_id, row, FROZEN, NAME, "norm", 0.0, float("nan"), SCORE, step=step, last_clean=last_clean - 1)
