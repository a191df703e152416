"""Hard rule: a value stands at the edge of its dtype's range, one operation away from Inf."""

from typing import Final

import numpy as np

from trainsentry.anomaly.features import Floats
from trainsentry.anomaly.series_facts import Mask, SeriesFacts
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.statistics import MAX, MIN

LARGEST: Final = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
}
"""Largest finite value by dtype name. Eight-bit floats are missing: their scaling makes use of the edge."""

FLOAT16_EDGE: Final = 0.5
"""Share of float16's largest value from which on it is at the edge: one doubling away from Inf."""


def edge(dtype: str) -> float:
    """Return the magnitude from which on a value of this dtype is about to overflow; Inf for other dtypes.

    float16 works close to its limits, so its edge is half its largest value. The others never come near: a
    value whose square leaves the range makes the next variance, norm or product overflow.

    >>> edge("float16"), f"{edge('float32'):.2g}", edge("int64")
    (32752.0, '1.8e+19', inf)
    """
    largest = LARGEST.get(dtype)
    if largest is None:
        return float("inf")
    return largest * FLOAT16_EDGE if dtype == "float16" else float(largest**0.5)


NAME = "dtype_edge"

FLOAT16 = LARGEST["float16"]


class DtypeEdgeRule:
    """Finds rows whose largest magnitude reaches the edge of their dtype (`finite_range.edge`).

    What the backward pass makes in float16 is left out: a loss scaler raises its scale until that is near the edge.
    An activation that is there from its first sample on (a mask filled with the smallest float) is meant to.
    """

    def __init__(self, facts: SeriesFacts) -> None:
        self.facts = facts
        self._met: Mask = np.zeros(0, bool)
        self._usual: Mask = np.zeros(0, bool)
        self._edges = np.zeros(0)

    def rows(self, record: StepRecord) -> tuple[Mask, Floats, Floats]:
        """Return which rows are at the edge, and for each row its largest magnitude and its edge."""
        self._grow()
        where = record.where
        largest = np.fmax(np.abs(record.columns[MIN]), np.abs(record.columns[MAX]))
        edges = self._edges[record.layouts]
        with np.errstate(invalid="ignore"):
            found = (largest >= edges) & ~self.facts.scalar[where]
            found &= ~(self.facts.backward[where] & (edges <= FLOAT16))
        if not self._met[where].all():
            first = ~self._met[where]
            self._usual[record.ids[first & found & self.facts.activation[where]]] = True
            self._met[where] = True
        return found & ~self._usual[where], largest, edges

    def _grow(self) -> None:
        self.facts.refresh()
        missing = len(self.facts.scalar) - len(self._met)
        if missing:
            self._met = np.append(self._met, np.zeros(missing, bool))
            self._usual = np.append(self._usual, np.zeros(missing, bool))
        new = self.facts.table.layouts[len(self._edges) :]
        if new:
            self._edges = np.append(self._edges, [edge(layout.dtype) for layout in new])
