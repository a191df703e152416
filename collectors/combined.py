"""Statistics of a whole tensor from those of its parts, exactly: never a mean of means or of norms."""

from typing import Any

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.statistics import COLUMNS, INFS, MAX, MEAN, MIN, NANS, NORM, VALUE, ZEROS

Floats = npt.NDArray[np.float64]


def combine(
    values: Floats, numel: npt.NDArray[np.int64], starts: npt.NDArray[np.intp], ratios: npt.NDArray[np.bool_]
) -> Floats:
    """Return the statistics of tensors whose parts stand in consecutive rows, shape (groups, COLUMNS).

    `values` has shape (n, COLUMNS) and `numel` (n,) counts each part's elements; group i begins at row `starts[i]`.
    Where `ratios` is set the value column holds ‖Δ‖/‖w‖ of each part, and that of the whole is computed from both
    norms; elsewhere it becomes NaN.

    >>> parts = np.array([[-1.0, 3.0, 1.0, 3.0, 0, 0, 0.0, np.nan], [0.0, 0.0, 0.0, 0.0, 1, 0, 0.5, np.nan]])
    >>> combine(parts, np.array([4, 2]), np.array([0]), np.array([False]))[0, :7].round(3).tolist()
    [-1.0, 3.0, 0.8, 3.0, 1.0, 0.0, 0.167]
    """
    whole = np.full((len(starts), COLUMNS), np.nan)
    if not len(starts):
        return whole
    whole[:, MIN] = np.fmin.reduceat(values[:, MIN], starts)
    whole[:, MAX] = np.fmax.reduceat(values[:, MAX], starts)
    for count in (NANS, INFS):
        whole[:, count] = np.add.reduceat(values[:, count], starts)
    size = np.add.reduceat(numel, starts)
    finite = numel - values[:, NANS] - values[:, INFS]
    with np.errstate(divide="ignore", invalid="ignore"):
        # Weighted by shares, which no number of elements can make overflow.
        shares = finite / np.repeat(np.add.reduceat(finite, starts), _lengths(starts, len(values)))
        means = np.where(finite > 0, values[:, MEAN] * shares, 0.0)
        whole[:, MEAN] = np.where(np.add.reduceat(finite, starts) > 0, np.add.reduceat(means, starts), np.nan)
        zeros = np.where(numel > 0, np.rint(values[:, ZEROS] * numel), 0.0)
        whole[:, ZEROS] = np.add.reduceat(zeros, starts) / size
    whole[:, NORM] = _norms(values[:, NORM], starts)
    if ratios.any():
        whole[:, VALUE] = np.where(ratios, _ratios(values, whole[:, NORM], starts), np.nan)
    return whole


def _lengths(starts: npt.NDArray[np.intp], n: int) -> npt.NDArray[np.intp]:
    return np.diff(np.append(starts, n))


def _norms(norms: Floats, starts: npt.NDArray[np.intp]) -> Floats:
    """Return √Σ norm², scaled by the largest so that no square overflows."""
    largest = np.maximum.reduceat(norms, starts)
    scale: Any = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    scaled = norms / np.repeat(scale, _lengths(starts, len(norms)))
    total: Floats = scale * np.sqrt(np.add.reduceat(scaled * scaled, starts))
    return total


def _ratios(values: Floats, norms: Floats, starts: npt.NDArray[np.intp]) -> Floats:
    """Return ‖Δ‖/‖w‖ of wholes. A part that has not moved does not tell its ‖w‖, so then it is NaN, or 0 for all."""
    ratio, norm = values[:, VALUE], values[:, NORM]
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.where(norm > 0, norm / ratio, 0.0)  # a ratio of Inf: the weights were zero
        hidden = np.logical_or.reduceat((norm == 0) & (ratio == 0), starts)
        found = norms / _norms(np.nan_to_num(weights, posinf=0.0), starts)
    return np.where(norms == 0, 0.0, np.where(hidden, np.nan, found))
