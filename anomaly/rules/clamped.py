"""An output whose largest element is exactly the same from a sample on, below all before: something clamps it."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_OUTPUT
from trainsentry.collectors.statistics import MAX, MIN, NORM

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as float32 numbers that move are not equal thrice by chance."""

BEFORE: Final = 16
"""Samples before, whose largest elements must all be larger: a bound that a model was built with has never been
exceeded."""

EQUAL: Final = 3
"""Samples in a row with the same largest element, while the norm moves."""

LARGER: Final = 1.02
"""Factor by which the samples before must exceed it: what saturates comes near its bound first."""

FEWEST: Final = 32
"""Elements of an output that is followed: of few, the largest may well be a constant, as of a padded row."""

FINE: Final = frozenset({"float32", "float64"})
"""Dtypes that are followed: numbers of sixteen bits are equal thrice by chance, where the largest moves little."""

_KEPT: Final = BEFORE + EQUAL


class ClampedRule(Rule):
    """Compares the largest and the least element of each output with those of its last samples, exactly.

    A hook that was left behind, a cast to a dtype of a smaller range, or a clip that somebody added holds all larger
    elements at one value. Where two of the samples before have the same extreme too, as those of a frozen table that
    the same rare token is looked up in, nothing is said: its largest may just not have come.
    """

    name: ClassVar[str] = "clamped"
    quantities: ClassVar[frozenset[str]] = frozenset({ACTIVATION_OUTPUT})
    statistics: ClassVar[frozenset[str]] = frozenset({"min", "max", "norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._follows = arrays.series.column(bool, of=lambda s: s.quantity == ACTIVATION_OUTPUT)
        # Of each series, by side and newest last: the largest element, and the negative of the least.
        self._kept = arrays.series.column(np.float64, np.nan, shape=(2, _KEPT))
        self._is_fine = arrays.layouts.column(bool, of=lambda layout: layout.dtype in FINE)
        self._norm = arrays.series.column(np.float64)
        self._steps = arrays.series.column(np.int64, -1, shape=(1 + EQUAL,))

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the outputs that are clamped, once for each value, by the first sample that is."""
        record = observed.record
        follows = self._follows.values[record.where] & self._is_fine.values[record.layouts]
        rows = rows_where(follows & observed.judged & (observed.numel >= FEWEST))
        if not len(rows):
            return []
        ids, columns = record.ids[rows], record.columns
        kept, steps = self._kept.values[:, :, ids], self._steps.values[:, ids]
        kept = np.concatenate((kept[:, 1:], np.stack((columns[MAX][rows], -columns[MIN][rows]))[:, None]), axis=1)
        steps = np.concatenate((steps[1:], np.full((1, len(rows)), record.step)))
        self._kept.values[:, :, ids], self._steps.values[:, ids] = kept, steps
        moved = columns[NORM][rows] != self._norm.values[ids]
        self._norm.values[ids] = columns[NORM][rows]
        now = kept[:, BEFORE:]
        with np.errstate(invalid="ignore"):
            clamped = (now == now[:, :1]).all(axis=1) & (now[:, 0] > 0) & moved
            clamped &= (kept[:, :BEFORE] > LARGER * now[:, :1]).all(axis=1)
        return [
            self._finding(int(ids[i]), int(rows[i]), kept[side, :, i], steps[:, i], side)
            for side, i in np.argwhere(clamped).tolist()
            if len(np.unique(kept[side, :BEFORE, i])) == BEFORE
        ]

    def _finding(self, series_id: int, row: int, kept: Floats, steps: Integers, side: int) -> Finding:
        sign, statistic = (1.0, "max") if side == 0 else (-1.0, "min")
        value, usual = sign * float(kept[-1]), sign * float(np.median(kept[:BEFORE]))
        detail = (SHIFT, self.name, statistic, value, usual, SCORE)
        return Finding(series_id, row, *detail, step=int(steps[1]), last_clean=int(steps[0]))

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the value, and the usual one."""
        which = "largest" if anomaly.statistic == "max" else "least"
        return (
            f"the {which} element of {subject} is exactly {anomaly.value:.6g} in each sample since step "
            f"{anomaly.step}, and was beyond that before, usually {anomaly.expected:.6g}: something clamps it"
        )
