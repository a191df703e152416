"""Gives the rules one gradient of each parameter, the one that the optimizer uses, where each micro-step's was read."""

from dataclasses import replace

import numpy as np

from trainsentry.anomaly.series_arrays import Integers, SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import GRADIENT


class SummedGradients:
    """Leaves out of a record the running sums that are not complete, and numbers the last ones as if they were alone.

    With `gradients.per_micro_step` a record holds, for each parameter, the gradient after each micro-step, and the last
    of them is what the optimizer uses. Rules on optimizers and baselines of gradients mean that one, by the series of
    micro-step 0, which also stays the same where a step has fewer micro-steps. (Without the option, a number above 0
    says that the optimizer makes several updates in a step.)
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._arrays = arrays
        self._is_gradient = arrays.series.column(bool, of=lambda s: s.quantity == GRADIENT and not s.scalar)
        self._first = arrays.series.column(np.int64, -1)  # of each gradient: its parameter's, of micro-step 0
        self._of_parameter: dict[tuple[int, str], list[int]] = {}
        self._placed = 0

    def last_of(self, record: StepRecord) -> tuple[StepRecord, Integers | None]:
        """Return a record with one gradient a parameter, and the rows that it has of the old one; None for all."""
        self._place_new()
        rows = rows_where(self._is_gradient.values[record.where])
        first = self._first.values[record.ids[rows]]
        last = len(first) - 1 - np.unique(first[::-1], return_index=True)[1]
        last = last[first[last] >= 0]  # else the parameter had none in any first micro-step, as of an expert
        if len(last) == len(rows) and (first == record.ids[rows]).all():
            return record, None
        kept = np.ones(len(record), bool)
        kept[rows] = False
        kept[rows[last]] = True
        ids = record.ids.copy()
        ids[rows] = first
        return replace(record, ids=ids).select(kept), rows_where(kept)

    def _place_new(self) -> None:
        series = self._arrays.series.items
        for i in range(self._placed, len(series)):
            if self._is_gradient.values[i]:
                same = self._of_parameter.setdefault((series[i].vpp_stage, series[i].name), [])
                same.append(i)
                first = next((j for j in same if not series[j].micro_step), -1)
                self._first.values[same] = first
        self._placed = len(series)
