"""Series too small to matter: rounding noise, or a weight that has only begun to grow from zero."""

from typing import Any, Final

import numpy as np

from trainsentry.anomaly.baselines.baseline import LOCATION, Baseline
from trainsentry.anomaly.baselines.series_groups import SeriesGroups
from trainsentry.anomaly.features import SIZES
from trainsentry.anomaly.series_arrays import Floats, SeriesArrays, medians, rows_where
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    GRADIENT,
    GRADIENT_UNREDUCED,
    PARAMETER,
    UPDATE,
)

_OF_SQUARES: Final = dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg"), 0.1)
_BACKWARD: Final = (GRADIENT, GRADIENT_UNREDUCED, ACTIVATION_GRAD_INPUT, ACTIVATION_GRAD_OUTPUT, UPDATE)
LEAST_SIZE: Final = {**dict.fromkeys(_BACKWARD, 3e-5), PARAMETER: 0.1, **_OF_SQUARES}
"""Size below which a tensor is negligible, as a share of the median of its group. The gradient of a bias ahead of a
batch norm is zero by its nature; in float32 it came out at 1e-6 to 1e-5 of the median, and its update, one unit in the
last place of the weight, at up to 2e-5. A weight that starts at zero grows by decades until it matters. An average of
squares rises by as much within a step where a layer begins to learn (a norm ahead of the first attention of a GPT: from
a hundredth of the median to the median)."""

STARTED_BELOW: Final = 10.0
"""A weight grows from zero if it starts this many times below that size; other weights may be far smaller than the
gains of norms by design, and matter."""

EVERY: Final = 4
"""Records between two updates of the floors; they seldom change."""

SAMPLES: Final = 5
"""Samples after which the size of a series is known."""

LEAST_SERIES: Final = 8
"""Series of a group for a meaningful median."""


class Negligible:
    """Holds a floor of sizes for each group; a size below the floor counts as the floor."""

    def __init__(self, groups: SeriesGroups, arrays: SeriesArrays) -> None:
        self.groups = groups
        self._floor = groups.columns.column(np.float32, -np.inf, shape=(SIZES,))
        self._applies = arrays.series.column(bool)
        self._started = arrays.series.column(bool)
        self._age = EVERY
        self._size = 0
        self._any_below = False

    def floor(self, ids: Any, group: Any) -> Floats | None:
        """Return the least sizes of rows in log units, shape (SIZES, n); None while no series is below its floor."""
        if not self._any_below:
            return None
        found: Floats = self._floor.values.take(group, axis=1)
        found[:, ~self._applies.values[ids]] = -np.inf
        return found

    def refresh(self, baseline: Baseline) -> None:
        """Update the floors every few records, and when there are new series."""
        self._age += 1
        size = len(self.groups.of)
        if self._age < EVERY and self._size == size:
            return
        self._age, self._any_below, self._size = 0, False, size
        known = (baseline.count >= SAMPLES) & ~np.isnan(baseline.state[LOCATION, 1])
        for name, share in LEAST_SIZE.items():
            if name in self.groups.names:
                number = self.groups.number(name)
                ids = rows_where(known & (self.groups.of == number))
                if len(ids) >= LEAST_SERIES:
                    sizes = baseline.state[LOCATION, :SIZES, ids]  # a row for each series
                    self._floor.values[:, number] = medians(sizes.T) + np.log(share)
                    self._note_applies(baseline, number, grows=name == PARAMETER)

    def _note_applies(self, baseline: Baseline, number: int, *, grows: bool) -> None:
        """Note the series of a group that the floor is for: all, or those that start at zero or far below it."""
        ids = rows_where((self.groups.of == number) & (baseline.count > 0))
        size, floor = baseline.state[LOCATION, 1, ids], self._floor.values[1, number]
        new = ids[~self._started.values[ids]]
        start = baseline.state[LOCATION, 1, new]
        self._applies.values[new] = np.isnan(start) | (start < floor - np.log(STARTED_BELOW)) | (not grows)
        self._started.values[new] = True
        self._any_below |= bool((self._applies.values[ids] & ~(size >= floor)).any())
