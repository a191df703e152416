"""Measures how far each layer is from its own usual: the log ratio to its running median, in robust deviations.

A layer's own past is the only fair scale: on one scale for all layers, rounding noise and the weights of normalisation
layers take all the colours, and a fault vanishes among them.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

WINDOW: Final = 48
"""Columns of the running median: a lasting change stays visible for half of them, a tenth of a full picture."""

LEAST: Final = 5
"""Columns before the first deviation: from fewer values no usual can be told."""

FEW: Final = 30.0
"""Where n columns come before, less than a window, the unit is wider by this over n: from few values a deviation is
poorly known, and a run moves most at its beginning, when warm-up and optimizer states grow by orders of magnitude."""

FLOOR: Final = 0.02
"""Least robust deviation, as a natural logarithm: changes of two per cent. Weights move by less, and their rounding
noise must not be coloured."""

LOWEST: Final = 1e-38
"""Sizes below count as this one: the smallest normal number of float32; a size of 0 has no logarithm."""

TOGETHER: Final = 8
"""Layers from which on their median is a common trend; with fewer it is one of them."""

TREND: Final = 31
"""Columns of the median that finds a common trend: what most layers share for longer than half of them is a trend, as
gradients shrink; a sudden step that they share stays."""

LAYERS: Final = 64
"""Layers whose windows are sorted at a time: 12 MB."""

_TO_DEVIATION: Final = 1.4826
"""From the median absolute residual to the standard deviation of a normal distribution."""


def deviations(sizes: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return how far each size is from its layer's usual; both have shape (layers, columns).

    The usual of a column is the median of the WINDOW sampled columns before it. A median of the past lags behind a
    trend, so what most layers share for long is taken off. The unit is the larger of two robust deviations: that of the
    whole row and that of the window, which is wide where a layer moves steadily, as at the beginning of a run. NaN
    stands for a column without a sample, or without a usual yet; Inf for a value that was not finite.
    """
    sampled = np.flatnonzero(~np.isnan(sizes).all(axis=0))
    found = np.full(sizes.shape, np.nan, np.float32)
    if not len(sampled) or not len(sizes):
        return found
    seen = sizes[:, sampled].astype(np.float64)
    logs = np.log(np.maximum(np.where(np.isfinite(seen), seen, np.nan), LOWEST))
    residuals = logs - _before(logs)
    residuals -= _common_trend(residuals)
    away = np.abs(residuals)
    unit = np.fmax(np.fmax(_median(away, 1)[:, None], _before(away)) * _TO_DEVIATION, FLOOR)
    before = np.clip(np.arange(len(sampled)), 1, WINDOW)
    unit = unit * (1 + FEW * (1 / before - 1 / WINDOW))
    found[:, sampled] = np.where(np.isinf(seen), np.inf, residuals / unit)
    return found


def _common_trend(residuals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the running median over columns of the layers' median, shape (columns,); 0 with few layers."""
    if len(residuals) < TOGETHER:
        return np.zeros(residuals.shape[1])
    middle = _median(residuals.T, TOGETHER)
    around = np.full(TREND // 2, np.nan)
    windows = sliding_window_view(np.concatenate([around, middle, around]), TREND)
    return np.nan_to_num(_median(windows, 1))


def _before(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the running median of the columns before each column, shape (layers, columns)."""
    nothing = np.full((len(values), WINDOW), np.nan)
    windows = sliding_window_view(np.concatenate([nothing, values[:, :-1]], axis=1), WINDOW, axis=1)
    parts = [_median(windows[first : first + LAYERS], LEAST) for first in range(0, len(windows), LAYERS)]
    return np.concatenate(parts)


def _median(values: npt.NDArray[np.float64], least: int) -> npt.NDArray[np.float64]:
    """Return the median of the last axis without its NaN; NaN where there are fewer than `least` values."""
    count = (~np.isnan(values)).sum(axis=-1, keepdims=True)
    ordered = np.sort(values, axis=-1)  # NaN come last
    middle = np.clip(np.concatenate([count - 1, count], axis=-1) // 2, 0, values.shape[-1] - 1)
    found: npt.NDArray[np.float64] = np.take_along_axis(ordered, middle, axis=-1).mean(axis=-1)
    return np.where(count[..., 0] >= least, found, np.nan)
