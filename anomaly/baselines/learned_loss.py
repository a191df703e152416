"""A loss far below the level at which training began: it tells of single samples, no longer of the training."""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from trainsentry.anomaly.rules.scalars.loss_above_start import FIRST
from trainsentry.anomaly.series_arrays import Floats

SHARE: Final = 0.1
"""Share of the start at which a loss begins to tell of the training. Where data is known by heart, the mean over a
batch is that of the few samples that are not: of 32, one that is as wrong as at the start makes 3 % of the start, and
one that is wrong with confidence three times as much. Such a loss leaps tenfold from batch to batch."""

MOST: Final = 20.0
"""Largest factor that is asked of a leap for this, beside its usual least one: a squared error may begin a thousandfold
above where it is trained for weeks. Losses known by heart leapt by up to 20 in healthy runs."""

RECENT: Final = 256
LEAP: Final = math.log(2)
AGAIN: Final = math.log(1.5)
YET: Final = 8
"""Newest losses among which a leap, from twice the usual one on, makes another one as large, or nearly, nothing new: in
a run of thousands of steps a loss of a vision transformer swung over four decades, from batch to batch. The last `YET`
do not count: a leap may take two steps to be told."""

MOST_FALLEN: Final = math.log(30)
"""Largest fall since the start that counts for gradients, which rose up to 66-fold in healthy runs; 2.5-fold they may
rise anyway. A sum over many ranks is found by its factor, which lasts."""

SWINGS: Final = 16
"""Losses before the last `YET` whose range is how far the loss falls and rises now: where it falls by decades within
some steps, as a model that has found the solution, one that is still lower is nothing new."""


class LearnedLoss:
    """Remembers the losses with which training began, the newest ones and their leaps, in log units by series id."""

    def __init__(self) -> None:
        self._start: dict[int, tuple[float, int]] = {}
        self._newest: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._swings: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SWINGS + YET))

    def note(self, ids: Sequence[int], sizes: Floats, usual: Floats, below: Floats) -> None:
        """Take in the losses of a record, in log units, and those of learned ones that leap above the `usual` ones."""
        leaps = (below > 0) & (sizes > usual + LEAP)
        for series_id, size, is_leap in zip(ids, sizes.tolist(), leaps.tolist(), strict=True):
            start, count = self._start.get(series_id, (-math.inf, 0))
            if count < FIRST and math.isfinite(size):
                self._start[series_id] = max(start, size), count + 1
            if math.isfinite(size):
                self._newest[series_id].append(size if is_leap else -math.inf)
                self._swings[series_id].append(size)

    def below(self, ids: Sequence[int], usual: Floats) -> Floats:
        """Return how far the usual losses lie below the share of their start, in log units; 0 where they are above.

        It is the log of `MOST` at most, or what the newest leaps have had.
        """
        starts = np.array([self._start.get(i, (-math.inf, 0))[0] for i in ids])
        largest = np.array([max(list(self._newest[i])[:-YET], default=-math.inf) for i in ids])
        most = np.fmax(math.log(MOST), largest + AGAIN - usual)
        return np.fmin(np.fmax(starts + math.log(SHARE) - usual, 0.0), most)

    def least(self, ids: Sequence[int]) -> Floats:
        """Return the size down to which a loss may fall: below those of lately by their range; Inf if unknown.

        One outlier on each side does not count.
        """
        lately = [sorted(list(self._swings[i])[:-YET]) for i in ids]
        return np.array([2 * sizes[1] - sizes[-2] if len(sizes) > 1 else math.inf for sizes in lately])

    def fallen(self, ids: Sequence[int], usual: Floats) -> float:
        """Return how far the usual losses lie below their start, in log units, up to `MOST_FALLEN`.

        It is 0 unless all are learned.
        """
        falls = [self._start.get(i, (-math.inf, 0))[0] - size for i, size in zip(ids, usual.tolist(), strict=True)]
        least = min(falls, default=0.0)
        return min(least, MOST_FALLEN) if least > -math.log(SHARE) else 0.0

    def saved(self) -> dict[str, list[float]]:
        """Return plain data, by series id."""
        return {str(i): [start, count] for i, (start, count) in self._start.items()}

    def adopt(self, series_id: int, saved: Mapping[str, list[float]], place: int) -> None:
        """Restore a series from the saved one with the id `place`."""
        if str(place) in saved:
            start, count = saved[str(place)]
            self._start[series_id] = float(start), int(count)
