"""How far tensors have been from what an equation says of them, and which of them are further away than ever."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import RECURRENCE
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.series_arrays import Column, Floats, Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.series import Series

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as such an equation holds to rounding."""

TIMES_RESIDUAL: Final = 30.0
"""A tensor is wrong at so many times its largest residual so far, which measures rounding and what changes gradients
after they are read."""

MOST_OF_CHANGE: Final = 0.5
"""Largest residual as a share of the tensor's own change, for an equation that explains the change: one that gives
little beside the tensor's size may say nothing of it (Lion averages gradients by its second beta)."""

NOTHING: Final = 2e-7
"""Share of the size below which a tensor neither moves nor should, some float32 rounding: gradients whose sum is zero
by their nature, as ahead of a norm."""

MOST_AT_ONCE: Final = 0.5
"""Share of the tensors that may be wrong at once: where most are, the training's own loop changed what the equation is
made of."""


@dataclass(frozen=True, slots=True)
class ResidualBounds:
    """What a residual is compared with, as a share of the tensor's size, and the samples that a tensor must follow.

    Below `least` none counts. Above `largest` a tensor does not follow the equation at all, so that none is learned. A
    tensor is judged once it has followed in `learned` samples in a row.
    """

    least: float
    largest: float
    learned: int


class Residuals:
    """Learns the residuals of each series that follows an equation of `rule`, and finds those that follow no more.

    `most_wrong` masks, of the series of the last call, those that were wrong where most were, shape (n,), and is None
    where they were not.
    """

    def __init__(self, arrays: SeriesArrays, bounds: ResidualBounds, rule: str) -> None:
        self._bounds = bounds
        self._rule = rule
        self._largest: Column[Series] = arrays.series.column(np.float64)
        self._followed: Column[Series] = arrays.series.column(np.int64)
        self.most_wrong: Mask | None = None

    def judge(
        self,
        statistic: str,
        ids: Integers,
        rows: Integers,
        values: Floats,
        expected: Floats,
        residuals: Floats,
        changes: Floats | None = None,
    ) -> list[Finding]:
        """Return the series whose values are not as expected, and learn the residuals of the others.

        All arrays have shape (n,); `rows` are the series' rows in the record, `changes` how far each value is from the
        one before, in the unit of the residuals: an equation must explain them too.
        """
        return [
            Finding(
                int(ids[i]), int(rows[i]), RECURRENCE, self._rule, statistic, float(values[i]), float(expected[i]),
                SCORE, passed_on=False,
            )
            for i in self._wrong(ids, residuals, changes).tolist()
        ]  # fmt: skip

    def _wrong(self, ids: Integers, residuals: Floats, changes: Floats | None) -> Integers:
        """Return the places of the series that follow no more, and learn the residuals of the others.

        Ids and residuals have shape (n,); a residual that is not finite says nothing. None is returned where most are
        wrong.
        """
        bounds, largest, followed = self._bounds, self._largest.values, self._followed.values
        known = np.isfinite(residuals)
        judged = known & (followed[ids] >= bounds.learned)
        wrong = judged & (residuals > np.maximum(bounds.least, TIMES_RESIDUAL * largest[ids]))
        fine = known & ~wrong
        largest[ids[fine]] = np.maximum(largest[ids[fine]], residuals[fine])
        explained = residuals <= bounds.largest
        if changes is not None:  # until a tensor is judged, the equation must explain its changes
            explains = (residuals <= MOST_OF_CHANGE * changes) | (np.maximum(residuals, changes) < NOTHING)
            explained &= explains | (followed[ids] >= bounds.learned)
        followed[ids[fine & explained]] += 1
        followed[ids[fine & ~explained]] = 0
        are_most = wrong.sum() > max(1, MOST_AT_ONCE * judged.sum())
        self.most_wrong = wrong if are_most else None
        return np.zeros(0, np.int64) if are_most else rows_where(wrong)


def nearest(expected: Floats, found: Floats, scale: Floats) -> tuple[Floats, Floats]:
    """Return what is nearest to each tensor of what several options give, and its residual, each of shape (n,).

    `expected` has shape (options, n), NaN where an option says nothing. A residual is a share of `scale`, and is
    infinite where no option says anything.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.abs(expected - found) / scale
    places = np.where(np.isnan(apart), np.inf, apart).argmin(axis=0), np.arange(expected.shape[1])
    return expected[places], apart[places]
