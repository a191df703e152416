"""A value at the edge of its dtype's range, one operation away from Inf."""

import math
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import OVERFLOW, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import EVERY_TENSOR, Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Mask, SeriesArrays, rows_where
from trainsentry.anomaly.series_facts import SeriesFacts
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.statistics import MAX, MIN

LARGEST: Final = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
}
"""Largest finite value by dtype name. Eight-bit floats are missing: their scaling uses the whole range by design."""

FLOAT16_EDGE: Final = 0.5
"""The edge of float16, as a share of its largest value: one doubling away from Inf."""

FLOAT16: Final = LARGEST["float16"]

SCORE: Final = 100.0
"""Score of a value at the edge, in deviations; a decade beyond it adds one. A rule without a history outranks most
distances from normal."""


def edge(dtype: str) -> float:
    """Return the magnitude at which a value of this dtype is about to overflow; Inf for other dtypes.

    float16 works close to its limits, so its edge is half its largest value. The others never come near: a
    value whose square leaves the range makes the next variance, norm or product overflow.

    >>> edge("float16"), f"{edge('float32'):.2g}", edge("int64")
    (32752.0, '1.8e+19', inf)
    """
    largest = LARGEST.get(dtype)
    if largest is None:
        return float("inf")
    return largest * FLOAT16_EDGE if dtype == "float16" else float(largest**0.5)


class DtypeEdgeRule(Rule):
    """Finds rows whose largest magnitude reaches the `edge` of their dtype.

    Gradients in float16 are left out: a loss scaler raises its scale until they are near the edge. An activation that
    is there at its first sample (a mask filled with the smallest float) is there by design.
    """

    name: ClassVar[str] = "dtype_edge"
    speaks_for: ClassVar[str | None] = OVERFLOW
    quantities: ClassVar[frozenset[str]] = frozenset({EVERY_TENSOR})
    statistics: ClassVar[frozenset[str]] = frozenset({"min", "max"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._seen = arrays.series.column(bool)
        self._is_at_edge = arrays.series.column(bool)
        self._edges = arrays.layouts.column(np.float64, of=lambda layout: edge(layout.dtype))

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding for each judged row at the edge of its dtype."""
        record = observed.record
        self.wrong_rows = found = self.rows(record, observed.facts)
        rows = rows_where(found & observed.judged)
        if not len(rows):
            return []
        largest = magnitudes(record)[rows]
        edges = self._edges.values[record.layouts[rows]]
        return [
            Finding(int(record.ids[row]), row, OVERFLOW, self.name, "max", value, bound, _score(value, bound))
            for row, value, bound in zip(rows.tolist(), largest.tolist(), edges.tolist(), strict=True)
        ]

    def rows(self, record: StepRecord, facts: SeriesFacts) -> Mask:
        """Return which rows are at the edge of their dtype although they should not be, shape (n,)."""
        where = record.where
        edges = self._edges.values[record.layouts]
        with np.errstate(invalid="ignore"):
            found: Mask = (magnitudes(record) >= edges) & ~facts.scalar[where]
            found &= ~(facts.backward[where] & (edges <= FLOAT16))
        seen, is_at_edge = self._seen.values, self._is_at_edge.values
        if not seen[where].all():
            first = ~seen[where]
            is_at_edge[record.ids[first & found & facts.may_mask[where]]] = True
            seen[where] = True
        found &= ~is_at_edge[where]
        return found

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the magnitude and the edge; an edge of float16 is named, other dtypes share theirs."""
        dtype = "float16" if anomaly.expected <= FLOAT16 else "its dtype"
        return (
            f"{subject} reaches {anomaly.value:.3g} at step {anomaly.step}, above {anomaly.expected:.3g}, within one "
            f"operation of overflowing {dtype}"
        )


def _score(magnitude: float, bound: float) -> float:
    return SCORE + math.log10(magnitude / bound)


def magnitudes(record: StepRecord) -> Floats:
    """Return the largest magnitude of each row, shape (n,); NaN for rows without finite values."""
    found: Floats = np.fmax(np.abs(record.columns[MIN]), np.abs(record.columns[MAX]))
    return found
