"""Values of a tensor that hold fewer bits than its dtype has, and than they did before: something rounds them."""

from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.anomaly import PRECISION, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_OUTPUT, PARAMETER
from trainsentry.collectors.statistics import MAX, MIN, NORM

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as a rounded value is rounded whatever came before."""

FLOAT32: Final = "float32"

BITS: Final = {"bfloat16": 8, "float16": 11}
"""Significant bits of the dtypes to which values are rounded, the leading one included."""

FULL_BEFORE: Final = 3
"""Samples with full precision before rounding counts: what is rounded by design is so from the start."""

FULL: Final = 18
"""Significant bits of a sample with full precision. Those in between are of sums of few rounded numbers, as of two
layers under autocast, which have few bits now and then: of numbers with 24, one in 2^14 samples has so few."""

DISTRUST: Final = 32
"""Further samples with full precision that it then takes."""

NEW_VALUES: Final = 2
"""Points of a sample with new, rounded extremes. A changed tensor with the rounded extremes of the sample before has
one: small updates of rounded weights are lost."""

POINTS: Final = 4
"""Points of rounded samples in a row that make a finding: with two extremes each, new ones come so twice in 10^15."""

ROUND_BITS: Final = 4
"""Significant bits of numbers such as 0.5, 1 or 6, at which values are clipped by design: they say nothing."""

SMALLEST: Final = 2.0**-100
SMALLEST_FLOAT16: Final = 2.0**-14
"""Smallest magnitude that counts: float32 below 2^-126 and float16 below 2^-14 lose bits by themselves. What is smaller
and has few bits is the rest of a sum that cancels, as the gradient of a bias ahead of a batch norm."""

REST: Final = 2.0**-18
"""Share of the largest tensor of its kind, in the same record, below which a tensor is such a rest: float32 holds 24
bits, so a sum that cancels leaves six or fewer."""


class PrecisionRule(Rule):
    """Looks at the extremes of float32 tensors, which are values of the tensor: a rounded tensor's are rounded too.

    Weights that are kept in bfloat16, states that pass through it and activations computed in it are found without any
    further reading. Gradients are left out: under autocast they arrive rounded, and only clipping gives them all bits.
    (Micikevicius et al., "Mixed precision training", ICLR 2018, on why weights need float32.)
    """

    name: ClassVar[str] = "precision"
    speaks_for: ClassVar[str | None] = PRECISION
    quantities: ClassVar[frozenset[str]] = frozenset({PARAMETER, ACTIVATION_OUTPUT, OPTIMIZER_STATE})
    statistics: ClassVar[frozenset[str]] = frozenset({"min", "max", "norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        own = {PARAMETER, ACTIVATION_OUTPUT}
        self._follows = arrays.series.column(bool, of=lambda s: s.quantity in own or s.is_state)
        kinds: dict[str, int] = {}
        self._kind = arrays.series.column(np.int64, of=lambda s: kinds.setdefault(s.quantity, len(kinds)))
        self._is_float32 = arrays.layouts.column(bool, of=lambda layout: layout.dtype == FLOAT32)
        self._full = arrays.series.column(np.int64)
        self._full_at, self._rounded = arrays.series.column(np.int64, -1), arrays.series.column(np.int64)
        self._largest, self._norm = arrays.series.column(np.float64), arrays.series.column(np.float64)

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the series whose extremes are rounded since they were not."""
        record = observed.record
        follows: Mask = self._follows.values[record.where] & self._is_float32.values[record.layouts] & observed.judged
        rows = rows_where(follows)
        if not len(rows):
            return []
        ids = record.ids[rows]
        low, high = (np.abs(record.columns[c][rows]) for c in (MIN, MAX))
        largest = np.fmax(low, high)
        bits = np.fmax(significant_bits(low), significant_bits(high))
        rest = largest < REST * self._largest_of_kind(ids.astype(np.int64), largest)
        new, moved = self._are_new(ids.astype(np.int64), largest, record.columns[NORM][rows])
        telling = ~rest & np.isfinite(largest) & (bits > ROUND_BITS) & (largest >= SMALLEST)
        telling &= (low % 1 != 0) | (high % 1 != 0)  # whole numbers count something
        rounded = telling & (bits <= np.where(largest >= SMALLEST_FLOAT16, BITS["float16"], BITS["bfloat16"]))
        rounded &= new | (moved & (self._rounded.values[ids] > 0))
        many = telling & new & (bits > BITS["float16"])
        full = many & (bits >= FULL)
        self._full.values[ids[full]] += 1
        self._full.values[ids[many & ~full]] = -DISTRUST
        self._full_at.values[ids[full]] = record.step
        self._rounded.values[ids[many]] = 0
        self._rounded.values[ids[rounded]] += np.where(new, NEW_VALUES, 1)[rounded]
        found = rounded & (self._rounded.values[ids] >= POINTS) & (self._full.values[ids] >= FULL_BEFORE)
        self._full.values[ids[found]] = 0
        return [self._finding(int(ids[i]), int(rows[i]), float(largest[i]), int(bits[i])) for i in rows_where(found)]

    def _are_new(self, ids: Integers, largest: Floats, norm: Floats) -> tuple[Mask, Mask]:
        """Return of which tensors the largest magnitude is another than in the sample before, and of which the norm."""
        new, moved = largest != self._largest.values[ids], norm != self._norm.values[ids]
        self._largest.values[ids], self._norm.values[ids] = largest, norm
        return new, moved

    def _largest_of_kind(self, ids: Integers, largest: Floats) -> Floats:
        """Return the largest finite magnitude among the tensors of each one's quantity."""
        kinds = self._kind.values[ids]
        found = np.zeros(int(kinds.max()) + 1)
        np.maximum.at(found, kinds, np.where(np.isfinite(largest), largest, 0.0))
        of_each: Floats = found[kinds]
        return of_each

    def _finding(self, series_id: int, row: int, value: float, bits: int) -> Finding:
        dtype = "bfloat16" if bits <= BITS["bfloat16"] else "float16"
        clean = int(self._full_at.values[series_id])
        return Finding(series_id, row, PRECISION, self.name, dtype, value, float("nan"), SCORE, last_clean=clean)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return to which dtype the values are rounded."""
        return (
            f"the values of {subject} are rounded to {anomaly.statistic} by step {anomaly.step} (its largest is "
            f"{anomaly.value!r}), although its dtype is float32 and they were not before"
        )


def significant_bits(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return how many significant bits numbers have as float32; 0 for zero and for what is not finite.

    >>> significant_bits(np.array([0.0, 0.5, 6.0, 0.15625, float(np.float32(0.1))])).tolist()
    [0, 1, 2, 3, 24]
    """
    mantissa, _ = np.frexp(np.where(np.isfinite(values), values, 0.0))
    whole = np.abs(mantissa * 2.0**24).astype(np.int64)
    lowest = whole & -whole
    with np.errstate(divide="ignore"):
        found = np.where(whole > 0, 24 - np.log2(np.maximum(lowest, 1)), 0)
    return found.astype(np.int64)
