"""The features of a row: a few numbers on a scale on which healthy noise is additive."""

from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.series_arrays import Floats, rows_where
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM, VALUE, ZEROS

FEATURES: Final = ("max", "norm", "mean", "zeros")
"""The largest magnitude, which one bad element moves; the norm, which a whole layer moves; the mean, for signs and
offsets; the share of zeros, for death and underflow."""

MAX_FEATURE: Final = 0
MEAN_FEATURE: Final = 2
ZEROS_FEATURE: Final = 3
SIZES: Final = 2
"""The first features are sizes, on a log scale: they may spike and drift. The others are judged by their jumps."""

FEW: Final = 16
"""Elements below which neither mean nor zeros are followed: the mean of a few numbers changes sign by chance."""

ZEROS_SLACK: Final = 0.05
"""Share added to each side of the odds of zeros: a few silent units of a layer do not matter, and without it one of 64
was a jump by a factor of a hundred."""

NOTHING: Final = 1e-30
"""Magnitudes up to this count as zero and are not followed: near the smallest floats, noise spans decades."""


def features_of(column: Floats, numel: Floats, scalar: npt.NDArray[np.bool_], divisor: Floats) -> Floats:
    """Return the features of rows, shape (len(FEATURES), n); NaN where a feature is not followed.

    `column` holds the statistics, shape (COLUMNS, n). `numel` counts the elements of each row, `divisor` is a known
    factor that is taken out of its sizes (the learning rate of an update). In order: log max|x|, log of the root mean
    square (which does not depend on how a tensor is sharded), mean ÷ root mean square, log-odds of the share of zeros
    with `ZEROS_SLACK` added to each side; where all elements are zero, the others are NaN.

    >>> row = np.array([[-1.0, 2.0, 0.5, 8.0, 0, 0, 0.25, 0]])
    >>> features_of(row.T, np.array([64.0]), np.array([False]), np.array([1.0])).astype(float).round(2).T.tolist()
    [[0.69, 0.0, 0.5, -0.98]]
    """
    rows = column.shape[1]
    sizes = np.empty((SIZES, rows))
    np.fmax(np.abs(column[MIN]), np.abs(column[MAX]), out=sizes[0])
    np.divide(column[NORM], np.sqrt(np.maximum(numel, 1.0)), out=sizes[1])
    sizes[:, scalar] = np.abs(column[VALUE, scalar])
    # A history that lacks one of the two is judged by the other.
    if np.isnan(sizes).any():
        sizes = np.where(np.isnan(sizes), sizes[::-1], sizes)
    found = np.empty((len(FEATURES), rows), np.float32)
    zeros = column[ZEROS]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        sizes[~((sizes > NOTHING) & (sizes < np.inf))] = np.nan
        found[:SIZES] = np.log(sizes / divisor)
        found[2] = column[MEAN] / sizes[1]
        found[3] = np.log((zeros + ZEROS_SLACK) / (1 - zeros + ZEROS_SLACK))
    dead = rows_where(zeros == 1)
    found[3, dead] = np.log(2 * numel[dead] + 1)  # as if half an element were not zero: farther out than any share
    found[SIZES:, scalar | (numel < FEW)] = np.nan
    found[~np.isfinite(found)] = np.nan
    return found


def as_statistic(feature: int, value: float, numel: float, divisor: float) -> float:
    """Return a feature as the statistic that it was made of.

    >>> round(as_statistic(1, 0.0, 16.0, 1.0), 6), round(as_statistic(3, 0.0, 16.0, 1.0), 6)
    (4.0, 0.5)
    """
    if feature == 0:
        return float(np.exp(value)) * divisor
    if feature == 1:
        return float(np.exp(value) * np.sqrt(max(numel, 1.0))) * divisor
    if feature == MEAN_FEATURE:
        return value
    odds = float(np.exp(value))
    return min(max((odds * (1 + ZEROS_SLACK) - ZEROS_SLACK) / (1 + odds), 0.0), 1.0)
