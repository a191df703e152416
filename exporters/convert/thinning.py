"""Thins a long series without losing outliers: keeps the lowest and the highest value of each bin of steps.

TensorBoard keeps 1,000 random points of a tag, so at 10,000 steps it shows one in ten of the spikes that last one step.
It keeps all points of a shorter series, so the thinning is done here.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

POINTS: Final = 1000
"""Points of a tag that TensorBoard shows (its default `--samples_per_plugin scalars=1000`)."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptValues:
    """The values kept of a step, with the slot (`key * columns + column`) of each."""

    step: int
    slots: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


def steps_per_bin(steps: int, points: int = POINTS) -> int:
    """Return how many steps share a bin so that at most `points` of `steps` remain; 1 keeps all.

    A bin keeps up to three points: the lowest, the highest and the first NaN. The first and the last step are kept.

    >>> steps_per_bin(1000), steps_per_bin(10_000)
    (1, 31)
    """
    return 1 if steps <= points else math.ceil(steps / ((points - 2) // 3))


class _Bin:
    """The extremes of every slot since the bin began."""

    def __init__(self) -> None:
        self.low = np.empty(0)
        self.high = np.empty(0)
        self.low_step = np.empty(0, np.int64)
        self.high_step = np.empty(0, np.int64)
        self.nan_step = np.empty(0, np.int64)

    def grow(self, slots: int) -> None:
        more = slots - len(self.low)
        if more > 0:
            self.low = np.append(self.low, np.full(more, np.inf))
            self.high = np.append(self.high, np.full(more, -np.inf))
            self.low_step = np.append(self.low_step, np.full(more, -1))
            self.high_step = np.append(self.high_step, np.full(more, -1))
            self.nan_step = np.append(self.nan_step, np.full(more, -1))

    def take(self, step: int, slots: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
        self.grow(int(slots.max(initial=-1)) + 1)
        lower = (values < self.low[slots]) | ((self.low_step[slots] < 0) & ~np.isnan(values))
        self.low[slots[lower]], self.low_step[slots[lower]] = values[lower], step
        higher = (values > self.high[slots]) | ((self.high_step[slots] < 0) & ~np.isnan(values))
        self.high[slots[higher]], self.high_step[slots[higher]] = values[higher], step
        first = np.isnan(values) & (self.nan_step[slots] < 0)
        self.nan_step[slots[first]] = step

    def empty(self) -> Iterator[KeptValues]:
        """Yield the kept values step by step, and start the next bin."""
        low, nan = np.flatnonzero(self.low_step >= 0), np.flatnonzero(self.nan_step >= 0)
        high = np.flatnonzero((self.high_step >= 0) & (self.high_step != self.low_step))
        slots = np.concatenate([low, high, nan])
        steps = np.concatenate([self.low_step[low], self.high_step[high], self.nan_step[nan]])
        values = np.concatenate([self.low[low], self.high[high], np.full(len(nan), np.nan)])
        order = np.lexsort((slots, steps))
        slots, steps, values = slots[order], steps[order], values[order]
        cuts = np.flatnonzero(np.diff(steps)) + 1
        parts = zip(np.split(steps, cuts), np.split(slots, cuts), np.split(values, cuts), strict=True)
        for step, slot, value in parts:
            if len(step):
                yield KeptValues(int(step[0]), slot, value)
        self.low[:], self.high[:] = np.inf, -np.inf
        self.low_step[:] = self.high_step[:] = self.nan_step[:] = -1


def thinned(steps: Iterable[KeptValues], width: int) -> Iterator[KeptValues]:
    """Yield the kept values of steps when `width` steps share a bin."""
    bin_ = _Bin()
    last: KeptValues | None = None
    filled, begun = 0, False
    for whole in steps:
        if width == 1 or not begun:
            begun = True
            yield whole
            continue
        if last is not None:
            bin_.take(last.step, last.slots, last.values)
            filled += 1
        if filled >= width:
            yield from bin_.empty()
            filled = 0
        last = whole
    if last is not None:
        yield from bin_.empty()
        yield last
