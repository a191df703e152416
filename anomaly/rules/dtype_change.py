"""Tensors whose dtype changes while the run goes on: a weight, a gradient, a state, or the outputs of many modules."""

from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.anomaly import DTYPE_CHANGE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.series_arrays import Integers, SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_OUTPUT, GRADIENT, PARAMETER, SeriesTable

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as only code changes a dtype."""


MANY: Final = 0.1
FEWEST: Final = 2
"""Share of the modules' outputs that autocast, once it is switched on or off, gives another dtype at least, and their
least number: an expert without tokens returns zeros of the default dtype, and is alone."""

HELD_FOR: Final = 3
"""Samples that outputs must have had their dtype for."""


class DtypeChangeRule(Rule):
    """Compares the layouts of a record with the last ones of the same series.

    Outputs of modules change where somebody begins or ends mixed precision, which is healthy: that explains an incident
    and makes none, and is told of once.
    """

    name: ClassVar[str] = "dtype_change"
    speaks_for: ClassVar[str | None] = DTYPE_CHANGE
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT, PARAMETER, OPTIMIZER_STATE, ACTIVATION_OUTPUT})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        self._keeps_dtype = arrays.series.column(bool, of=lambda s: s.quantity in {PARAMETER, GRADIENT} or s.is_state)
        self._layout = arrays.series.column(np.int64, -1)
        self._last = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._is_output = arrays.series.column(bool, of=lambda s: s.quantity == ACTIVATION_OUTPUT)
        dtypes: dict[str, int] = {}
        self._dtype = arrays.layouts.column(np.int64, of=lambda layout: dtypes.setdefault(layout.dtype, len(dtypes)))
        self._held = arrays.series.column(np.int64)
        self._has_told = False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding for each tensor whose dtype is not that of its sample before."""
        return self._of_outputs(observed) + self._of_kept(observed)

    def _of_outputs(self, observed: Observed) -> list[Finding]:
        """Return a finding for each module's output, if those of many have another dtype than before."""
        record = observed.record
        rows = rows_where(self._is_output.values[record.where] & (observed.numel > 0))
        if not len(rows) or self._has_told:
            return []
        ids, now = record.ids[rows].astype(np.int64), record.layouts[rows].astype(np.int64)
        before, held = self._layout.values[ids], self._held.values[ids]
        changed = (before >= 0) & (self._dtype.values[before] != self._dtype.values[now])
        self._layout.values[ids] = now
        self._held.values[ids] = np.where(changed, 0, held + 1)
        told = rows_where(changed & (held >= HELD_FOR))
        if len(told) < max(FEWEST, MANY * len(rows)):
            return []
        self._has_told = True
        found = self._findings(observed.table, ids[told], rows[told].astype(np.int64), (before[told], now[told]))
        return [replace(finding, alarm=False) for finding in found]

    def _of_kept(self, observed: Observed) -> list[Finding]:
        """Return a finding for each tensor that keeps its dtype, and has another one."""
        record = observed.record
        ids, layouts = self._last
        if np.array_equal(layouts, record.layouts) and np.array_equal(ids, record.ids):
            return []  # almost every record
        self._last = record.ids, record.layouts
        rows = rows_where(self._keeps_dtype.values[record.where])
        ids, now = record.ids[rows].astype(np.int64), record.layouts[rows].astype(np.int64)
        before = self._layout.values[ids]
        changed = rows_where((before >= 0) & (before != now))
        self._layout.values[ids] = now
        return self._findings(
            observed.table, ids[changed], rows[changed].astype(np.int64), (before[changed], now[changed])
        )

    def _findings(
        self, table: SeriesTable, ids: npt.NDArray[Any], rows: Integers, layouts: tuple[Integers, Integers]
    ) -> list[Finding]:
        found, nan = [], float("nan")
        for series_id, row, *both in zip(ids, rows, *layouts, strict=True):
            was, now = (table.layouts[layout].dtype for layout in both)
            if was != now:
                detail = (DTYPE_CHANGE, self.name, f"{was}→{now}", nan, nan, SCORE)
                found.append(Finding(int(series_id), int(row), *detail))
        return found

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return both dtypes."""
        was, _, now = anomaly.statistic.partition("→")
        return f"the dtype of {subject} changes from {was} to {now} at step {anomaly.step}"
