"""A weight, a gradient or an optimizer state whose dtype changes while the run goes on."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import DTYPE_CHANGE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import GRADIENT, PARAMETER, SeriesTable

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as only code changes a dtype."""


class DtypeChangeRule(Rule):
    """Compares the layouts of a record with the last ones of the same series."""

    name: ClassVar[str] = "dtype_change"
    speaks_for: ClassVar[str | None] = DTYPE_CHANGE
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT, PARAMETER, OPTIMIZER_STATE})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        self._keeps_dtype = arrays.series.column(bool, of=lambda s: s.quantity in {PARAMETER, GRADIENT} or s.is_state)
        self._layout = arrays.series.column(np.int64, -1)
        self._last = np.zeros(0, np.int32), np.zeros(0, np.int32)

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding for each tensor whose dtype is not that of its sample before."""
        record = observed.record
        ids, layouts = self._last
        if np.array_equal(layouts, record.layouts) and np.array_equal(ids, record.ids):
            return []  # almost every record
        self._last = record.ids, record.layouts
        rows = rows_where(self._keeps_dtype.values[record.where])
        ids, now = record.ids[rows], record.layouts[rows]
        before = self._layout.values[ids]
        changed = rows_where((before >= 0) & (before != now))
        self._layout.values[ids] = now
        found = (self._finding(observed.table, ids[i], rows[i], (before[i], now[i])) for i in changed.tolist())
        return [finding for finding in found if finding is not None]

    def _finding(
        self, table: SeriesTable, series_id: np.int32, row: np.intp, layouts: tuple[np.int64, np.int32]
    ) -> Finding | None:
        was, now = (table.layouts[layout].dtype for layout in layouts)
        if was == now:
            return None
        nan = float("nan")
        return Finding(int(series_id), int(row), DTYPE_CHANGE, self.name, f"{was}→{now}", nan, nan, SCORE)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return both dtypes."""
        was, _, now = anomaly.statistic.partition("→")
        return f"the dtype of {subject} changes from {was} to {now} at step {anomaly.step}"
