"""Layers of one kind are alike from the start: one that is far larger or smaller than its siblings is named once."""

import re
from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import DEAD, SHIFT
from trainsentry.anomaly.features import Floats
from trainsentry.anomaly.finding import Finding
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_OUTPUT, GRADIENT, PARAMETER, SeriesTable
from trainsentry.collectors.statistics import NORM

NAME: Final = "siblings"
SCORE: Final = 20.0

LOOK_AT: Final = {ACTIVATION_OUTPUT: 12, GRADIENT: 12, PARAMETER: 2}
"""Sampled records of a series after which it is compared: past the first steps of a warm-up; weights as they begin, and
when all of them have been seen."""

LEAST_SIBLINGS: Final = 3
"""Series of one kind in different layers, itself included, from which on one can be told from the others."""

RATIOS: Final = {ACTIVATION_OUTPUT: 1000.0, GRADIENT: 1000.0, PARAMETER: 6.0}
"""How many times larger or smaller than the nearest of the others: a Mamba whose initialisation was wrong had gradients
5,000 times smaller than its siblings. Weights of one kind differ by less than a factor of two in healthy models."""

MATRICES: Final = frozenset({GRADIENT, PARAMETER})
"""Quantities of which only tensors of two dimensions and more are compared: how large a bias is says nothing of its
layer, for its size at the start goes by the inputs that the layer has, and its gradient may be zero by nature."""

_LAYER: Final = re.compile(r"\d+")


class LayerOutlierRule:
    """Compares the root mean squares of series of one shape whose names differ in numbers alone, once each."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._known = 0
        self._families: dict[tuple[str, str, int], list[int]] = {}
        self._family_of: dict[int, tuple[str, str, int]] = {}
        self._watched = np.zeros(0, bool)
        self._seen = np.zeros(0, np.int64)
        self._look_at = np.zeros(0, np.int64)
        self._last = np.zeros(0)
        self._layout = np.zeros(0, np.int32)
        self._done: set[tuple[str, str, int]] = set()

    def judge(self, record: StepRecord, numel: Floats) -> list[Finding]:
        """Return what is unlike its siblings."""
        self._refresh()
        rows = np.flatnonzero(self._watched[record.where])
        if not len(rows):
            return []
        ids = record.ids[rows]
        self._last[ids] = record.columns[NORM, rows] / np.sqrt(np.maximum(numel[rows], 1.0))
        self._layout[ids] = record.layouts[rows]
        self._seen[ids] += 1
        due = {self._family_of[i] for i in ids[self._seen[ids] == self._look_at[ids]].tolist()} - self._done
        found = []
        row_of = dict(zip(ids.tolist(), rows.tolist(), strict=True)) if due else {}
        for family in sorted(due):
            self._done.add(family)
            for alike in self._of_one_shape(self._families[family]):
                found += self._unlike(alike, RATIOS[family[1]], row_of)
        if due and not self._families.keys() - self._done:
            self._watched[:] = False
        return found

    def _of_one_shape(self, family: list[int]) -> list[list[int]]:
        """Return the members of a family by their shapes, as far as these have been seen."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for series_id in family:
            if self._seen[series_id]:
                layout = self.table.layouts[self._layout[series_id]]
                by_shape.setdefault(layout.shape if layout.whole is None else layout.whole, []).append(series_id)
        matrices = self.table.series[family[0]].quantity in MATRICES
        return [alike for shape, alike in by_shape.items() if len(shape) > 1 or not matrices]

    def _unlike(self, family: list[int], ratio: float, row_of: dict[int, int]) -> list[Finding]:
        sizes = self._last[family]
        if len(family) < LEAST_SIBLINGS or not (np.isfinite(sizes) & (sizes > 0)).all():
            return []
        found = []
        for place, series_id in enumerate(family):
            others = np.delete(sizes, place)
            larger, smaller = sizes[place] > ratio * others.max(), sizes[place] * ratio < others.min()
            if larger or smaller:
                kind = SHIFT if larger else DEAD
                usual = float(np.median(others))
                row = row_of.get(series_id, -1)
                size = float(sizes[place])
                found.append(Finding(series_id, row, kind, NAME, "rms", size, usual, SCORE, last_clean=-1))
        return found

    def _refresh(self) -> None:
        new = self.table.series[self._known :]
        if not new:
            return
        for i, series in enumerate(new, self._known):
            if series.quantity in RATIOS and _LAYER.search(series.name):
                family = (_LAYER.sub("*", series.name), series.quantity, series.micro_step)
                self._families.setdefault(family, []).append(i)
                self._family_of[i] = family
        self._known = len(self.table.series)
        more = self._known - len(self._seen)
        self._watched = np.append(self._watched, [i in self._family_of for i in range(len(self._seen), self._known)])
        self._seen = np.append(self._seen, np.zeros(more, np.int64))
        self._last = np.append(self._last, np.full(more, np.nan))
        self._layout = np.append(self._layout, np.zeros(more, np.int32))
        self._look_at = np.append(self._look_at, [LOOK_AT.get(s.quantity, 0) for s in new])
