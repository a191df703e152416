"""A layer far larger or smaller than its sibling layers from the start."""

import re
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import DEAD, SHIFT, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_OUTPUT, GRADIENT, PARAMETER, Series, SeriesTable
from trainsentry.collectors.statistics import NORM

SCORE: Final = 20.0
"""Deviations: below the rules whose bounds hold for any model, as layers are alike by convention only."""

COMPARED_AT: Final = {ACTIVATION_OUTPUT: 12, GRADIENT: 12, PARAMETER: 2}
"""Sampled records of a series after which it is compared: past the first steps of a warm-up; weights at their start,
once all of them have been seen."""

LEAST_SIBLINGS: Final = 3
"""Least layers of a family, the outlier included, among which one can be told from the others."""

RATIOS: Final = {ACTIVATION_OUTPUT: 1000.0, GRADIENT: 1000.0, PARAMETER: 6.0}
"""Factor between an outlier and the nearest of its siblings: a Mamba whose initialisation was wrong had gradients 5,000
times smaller than its siblings. In healthy models weights of a family differ by less than a factor of two."""

MATRICES: Final = frozenset({GRADIENT, PARAMETER})
"""Quantities of which only tensors of two dimensions and more are compared: a bias starts at a size that depends on the
number of inputs of its layer, and its gradient may be zero by nature."""

_LAYER: Final = re.compile(r"\d+")

Family = tuple[str, str, int]
"""Series whose names differ in numbers alone: the name without them, the quantity, the micro-step."""


class LayerOutlierRule(Rule):
    """Compares the root mean squares of the series of a family that have one shape, once each."""

    name: ClassVar[str] = "siblings"
    quantities: ClassVar[frozenset[str]] = frozenset(RATIOS)
    statistics: ClassVar[frozenset[str]] = frozenset({"norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._families: dict[Family, list[int]] = {}
        self._done: set[Family] = set()
        arrays.series.before_growth(self._note_families)
        self._compared = arrays.series.column(bool, of=lambda s: _family_of(s) is not None)
        self._samples = arrays.series.column(np.int64)
        self._size = arrays.series.column(np.float64, np.nan)
        self._layout = arrays.series.column(np.int32)
        self._compared_at = arrays.series.column(np.int64, of=lambda s: COMPARED_AT.get(s.quantity, 0))

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the layers unlike their siblings."""
        record, table = observed.record, observed.table
        rows = rows_where(self._compared.values[record.where])
        if not len(rows):
            return []
        ids, samples = record.ids[rows], self._samples.values
        self._size.values[ids] = record.columns[NORM, rows] / np.sqrt(np.maximum(observed.numel[rows], 1.0))
        self._layout.values[ids] = record.layouts[rows]
        samples[ids] += 1
        ready = ids[samples[ids] == self._compared_at.values[ids]].tolist()
        due = {family for i in ready if (family := _family_of(table.series[i])) is not None} - self._done
        found = []
        row_of = dict(zip(ids.tolist(), rows.tolist(), strict=True)) if due else {}
        for family in sorted(due):
            self._done.add(family)
            for siblings in self._of_one_shape(family, table):
                found += self._outliers(siblings, RATIOS[family[1]], row_of)
        if due and not self._families.keys() - self._done:
            self._compared.values[:] = False
        return found

    def _of_one_shape(self, family: Family, table: SeriesTable) -> list[list[int]]:
        """Return the members of a family by their shapes, as far as these have been seen."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for series_id in self._families[family]:
            if self._samples.values[series_id]:
                layout = table.layouts[self._layout.values[series_id]]
                by_shape.setdefault(layout.shape if layout.whole is None else layout.whole, []).append(series_id)
        matrices = family[1] in MATRICES
        return [siblings for shape, siblings in by_shape.items() if len(shape) > 1 or not matrices]

    def _outliers(self, siblings: list[int], ratio: float, row_of: dict[int, int]) -> list[Finding]:
        sizes = self._size.values[siblings]
        if len(siblings) < LEAST_SIBLINGS or not (np.isfinite(sizes) & (sizes > 0)).all():
            return []
        found = []
        for place, series_id in enumerate(siblings):
            others = np.delete(sizes, place)
            larger, smaller = sizes[place] > ratio * others.max(), sizes[place] * ratio < others.min()
            if larger or smaller:
                detail = (SHIFT if larger else DEAD, self.name, "rms", float(sizes[place]), float(np.median(others)))
                found.append(Finding(series_id, row_of.get(series_id, -1), *detail, SCORE, last_clean=-1))
        return found

    def _note_families(self, first: int, new: Sequence[Series]) -> None:
        for i, series in enumerate(new, first):
            family = _family_of(series)
            if family is not None:
                self._families.setdefault(family, []).append(i)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the root mean square, and how far it is from that of the sibling layers."""
        times = f"{anomaly.value / anomaly.expected:.3g} times" if anomaly.expected > 0 else "unlike"
        return (
            f"the root mean square of {subject} is {anomaly.value:.3g} at step {anomaly.step}, {times} the median of "
            f"its sibling layers, {anomaly.expected:.3g}"
        )


def _family_of(series: Series) -> Family | None:
    if series.quantity not in RATIOS or not _LAYER.search(series.name):
        return None
    return _LAYER.sub("*", series.name), series.quantity, series.micro_step
