"""Series too small to matter: nothing but rounding, or a weight that has only begun to grow from zero."""

from typing import Any, Final

import numpy as np

from trainsentry.anomaly.baseline import LOCATION, Baseline
from trainsentry.anomaly.features import SIZES, Floats
from trainsentry.anomaly.kinds import Kinds
from trainsentry.collectors.series import GRADIENT, GRADIENT_UNREDUCED, PARAMETER, UPDATE

LEAST: Final = {GRADIENT: 3e-5, GRADIENT_UNREDUCED: 3e-5, UPDATE: 3e-5, PARAMETER: 0.1}
"""Size below which a tensor is of no account, as a share of the median of its kind. The gradient of a bias ahead of a
batch norm is zero by its nature; in float32 it came out at 1e-6 to 1e-5 of the median, and its update, one unit in the
last place of the weight, at up to 2e-5. A weight that begins at zero grows by decades until it matters."""

EVERY: Final = 4
"""Records after which is looked anew which series these are; they seldom change."""

KNOWN: Final = 5
"""Samples from which on the size of a series is known."""

ENOUGH: Final = 8
"""Series of a kind from which on their median says what is usual."""


class Trifles:
    """Holds the least sizes by kind; what is below counts as if it were there."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self._floor = np.zeros((0, SIZES), np.float32)
        self._age = EVERY
        self._any_low = False

    def floor(self, kind: Any) -> Floats | None:
        """Return the least sizes of rows, of shape (n, SIZES); None while no series is below."""
        return self._floor.take(kind, axis=0) if self._any_low else None

    def refresh(self, baseline: Baseline) -> None:
        """Look what is usual, once in a while."""
        more = len(self.kinds.names) - len(self._floor)
        self._floor = np.concatenate([self._floor, np.full((more, SIZES), -np.inf, np.float32)])
        self._age += 1
        if self._age < EVERY:
            return
        self._age, self._any_low = 0, False
        size = len(self.kinds.of)
        known = (baseline.count[:size] >= KNOWN) & ~np.isnan(baseline.state[LOCATION, :size, 1])
        for name, share in LEAST.items():
            if name in self.kinds.names:
                number = self.kinds.number(name)
                ids = np.flatnonzero(known & (self.kinds.of == number))
                if len(ids) >= ENOUGH:
                    sizes = baseline.state[LOCATION, ids, :SIZES]
                    floor = self._floor[number] = np.median(sizes, axis=0) + np.log(share)
                    self._any_low |= bool((sizes < floor).any())
