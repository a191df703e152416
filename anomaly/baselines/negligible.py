"""Series too small to matter: nothing but rounding, or a weight that has only begun to grow from zero."""

from typing import Any, Final

import numpy as np

from trainsentry.anomaly.baselines.baseline import LOCATION, Baseline
from trainsentry.anomaly.baselines.series_groups import SeriesGroups
from trainsentry.anomaly.features import SIZES, Floats
from trainsentry.collectors.series import GRADIENT, GRADIENT_UNREDUCED, PARAMETER, UPDATE

LEAST: Final = {GRADIENT: 3e-5, GRADIENT_UNREDUCED: 3e-5, UPDATE: 3e-5, PARAMETER: 0.1}
"""Size below which a tensor is of no account, as a share of the median of its kind. The gradient of a bias ahead of a
batch norm is zero by its nature; in float32 it came out at 1e-6 to 1e-5 of the median, and its update, one unit in the
last place of the weight, at up to 2e-5. A weight that begins at zero grows by decades until it matters."""

BEGAN_BELOW: Final = 10.0
"""Times below that size a weight must be when it is first looked at to be one that grows from zero; others may be small
beside the gains of norms by design, and matter."""

EVERY: Final = 4
"""Records after which is looked anew which series these are; they seldom change."""

KNOWN: Final = 5
"""Samples from which on the size of a series is known."""

ENOUGH: Final = 8
"""Series of a kind from which on their median says what is usual."""


class Negligible:
    """Holds the least sizes by kind; what is below counts as if it were there."""

    def __init__(self, kinds: SeriesGroups) -> None:
        self.kinds = kinds
        self._floor = np.zeros((SIZES, 0), np.float32)
        self._age = EVERY
        self._any_low = False
        self._applies = np.zeros(0, bool)
        self._looked_at = np.zeros(0, bool)

    def floor(self, ids: Any, kind: Any) -> Floats | None:
        """Return the least sizes of rows, of shape (SIZES, n); None while no series is below."""
        if not self._any_low:
            return None
        found: Floats = self._floor.take(kind, axis=1)
        found[:, ~self._applies[ids]] = -np.inf
        return found

    def refresh(self, baseline: Baseline) -> None:
        """Look what is usual, once in a while."""
        more = len(self.kinds.names) - self._floor.shape[1]
        if more:
            self._floor = np.concatenate([self._floor, np.full((SIZES, more), -np.inf, np.float32)], axis=1)
        self._age += 1
        size = len(self.kinds.of)
        if self._age < EVERY and len(self._applies) == size:
            return
        self._age, self._any_low = 0, False
        new = np.zeros(size - len(self._applies), bool)
        self._applies, self._looked_at = np.append(self._applies, new), np.append(self._looked_at, new)
        known = (baseline.count[:size] >= KNOWN) & ~np.isnan(baseline.state[LOCATION, 1, :size])
        for name, share in LEAST.items():
            if name in self.kinds.names:
                number = self.kinds.number(name)
                ids = np.flatnonzero(known & (self.kinds.of == number))
                if len(ids) >= ENOUGH:
                    sizes = baseline.state[LOCATION, :SIZES, ids]  # a row for each series
                    self._floor[:, number] = np.median(sizes, axis=0) + np.log(share)
                    self._look(baseline, number, grows=name == PARAMETER)

    def _look(self, baseline: Baseline, number: int, *, grows: bool) -> None:
        """Note which series of a kind the floor is for: all, or those that began at zero, or far below it."""
        ids = np.flatnonzero((self.kinds.of == number) & (baseline.count[: len(self._applies)] > 0))
        size, floor = baseline.state[LOCATION, 1, ids], self._floor[1, number]
        first = ids[~self._looked_at[ids]]
        began = baseline.state[LOCATION, 1, first]
        self._applies[first] = np.isnan(began) | (began < floor - np.log(BEGAN_BELOW)) | (not grows)
        self._looked_at[first] = True
        self._any_low |= bool((self._applies[ids] & ~(size >= floor)).any())
