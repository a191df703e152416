"""Invariants of what only people change: a module's mode, a tensor's dtype, a learning rate above all before."""

from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import DTYPE_CHANGE, LOSS_SCALE_COLLAPSE, MODE_CHANGE, UPDATE_SIZE
from trainsentry.anomaly.finding import Finding
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    GRADIENT,
    LEARNING_RATE,
    OPTIMIZER_RATE,
    PARAMETER,
    TRAINING_MODE,
    SeriesTable,
)
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 60.0

RATE_RATIO: Final = 4.0
"""Times the largest learning rate so far that a new one must be: warm-ups double it at most, and restarts of a schedule
return to what was there before."""

RATES: Final = (LEARNING_RATE, OPTIMIZER_RATE)
"""The rate that is logged, and the optimizer's own where the training loop logs one."""

RATES_BEFORE: Final = 10
"""Samples of the learning rate before a jump counts."""

SKIPPED_OF: Final = 30
SKIPPED: Final = 10
"""So many of so many steps must the loss scaler skip: it halves its scale at each, a thousandfold together."""

STEPS_BEFORE: Final = 30
"""Steps in which a loss scaler may look for its scale."""


class SwitchRule:
    """Finds modules whose mode changes, dtypes that change, a learning rate that jumps, a loss scale that collapses."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._last = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._layout = np.zeros(0, np.int64)
        self._fixed = np.zeros(0, bool)
        self._mode = np.zeros(0, bool)
        self._rate_ids: dict[int, str] = {}
        self._rates = dict.fromkeys(RATES, (0.0, 0))
        self._skips: list[int] = []
        self._first_step: int | None = None
        self._collapsed = False

    def judge(self, record: StepRecord) -> list[Finding]:
        """Return what was switched."""
        self._refresh()
        return [*self._modes(record), *self._dtypes(record), *self._rate_jump(record), *self._collapse(record)]

    def saved(self) -> list[float]:
        """Return the largest learning rates so far, each with its number of samples, as plain data."""
        return [float(number) for name in RATES for number in self._rates[name]]

    def load(self, saved: list[float]) -> None:
        """Go on from what was saved: a schedule that a restart begins anew shows."""
        for name, largest, count in zip(RATES, saved[::2], saved[1::2], strict=False):
            self._rates[name] = float(largest), int(count)

    def _refresh(self) -> None:
        start = len(self._fixed)
        new = self.table.series[start:]
        if new:
            fixed = [s.quantity in {PARAMETER, GRADIENT} or s.is_state for s in new]
            self._fixed = np.append(self._fixed, fixed)
            self._mode = np.append(self._mode, [s.quantity.startswith(TRAINING_MODE) for s in new])
            self._layout = np.append(self._layout, np.full(len(new), -1))
            self._rate_ids.update({i: s.quantity for i, s in enumerate(new, start) if s.quantity in RATES})

    def _modes(self, record: StepRecord) -> list[Finding]:
        rows = np.flatnonzero(self._mode[record.where]).tolist()
        return [self._mode_finding(record, row) for row in rows]

    @staticmethod
    def _mode_finding(record: StepRecord, row: int) -> Finding:
        now = float(record.values[row, VALUE])
        return Finding(
            int(record.ids[row]), row, MODE_CHANGE, "mode_change", "value", now, 1 - now, SCORE, passed_on=False
        )

    def _dtypes(self, record: StepRecord) -> list[Finding]:
        ids, layouts = self._last
        if np.array_equal(layouts, record.layouts) and np.array_equal(ids, record.ids):
            return []  # as a rule
        self._last = record.ids, record.layouts
        fixed = self._fixed[record.where]
        ids = record.ids[fixed]
        before = self._layout[ids]
        changed = (before >= 0) & (before != record.layouts[fixed])
        found = []
        if changed.any():
            rows = np.flatnonzero(fixed)
            for at in np.flatnonzero(changed).tolist():
                was = self.table.layouts[before[at]].dtype
                now = self.table.layouts[record.layouts[rows[at]]].dtype
                if was != now:
                    nan = float("nan")
                    found.append(
                        Finding(
                            int(ids[at]), int(rows[at]), DTYPE_CHANGE, "dtype_change", f"{was}→{now}", nan, nan, SCORE
                        )
                    )
        self._layout[ids] = record.layouts[fixed]
        return found

    def _rate_jump(self, record: StepRecord) -> list[Finding]:
        found = []
        for row in np.flatnonzero(np.isin(record.ids, list(self._rate_ids))).tolist() if self._rate_ids else []:
            series_id, rate = int(record.ids[row]), float(record.values[row, VALUE])
            name = self._rate_ids[series_id]
            usual, count = self._rates[name]
            if count >= RATES_BEFORE and rate > RATE_RATIO * usual > 0:
                detail = (UPDATE_SIZE, "learning_rate", "value", rate, usual, SCORE)
                found.append(Finding(series_id, row, *detail, passed_on=False))
            self._rates[name] = max(usual, rate if np.isfinite(rate) else 0.0), count + 1
        return found

    def _collapse(self, record: StepRecord) -> list[Finding]:
        if self._first_step is None:
            self._first_step = record.step
        self._skips = [s for s in self._skips if s > record.step - SKIPPED_OF]
        if record.skipped and (not self._skips or self._skips[-1] != record.step):
            self._skips.append(record.step)
        collapsed = len(self._skips) >= SKIPPED and record.step - self._first_step >= STEPS_BEFORE
        news, self._collapsed = collapsed and not self._collapsed, collapsed
        if not news or not len(record):
            return []
        value = float(len(self._skips))
        return [Finding(-1, -1, LOSS_SCALE_COLLAPSE, "loss_scale_collapse", "skipped", value, 0.0, SCORE)]
