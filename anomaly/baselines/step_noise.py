"""The noise of a scalar from one sample to the next, free of its trend."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from trainsentry.anomaly.series_arrays import Floats

MEMORY: Final = 32
"""Samples over which the size of a move is averaged."""

KNOWN: Final = 8
"""Moves before the noise is known."""

CLIP: Final = 4.0
"""A single move is clipped at this multiple of the usual move."""

TO_DEVIATION: Final = 1 / (0.798 * math.sqrt(2))
"""Factor from the mean size of a move to the deviation of independent noise."""


class StepNoise:
    """Follows the mean size of the moves of scalars, in log units, by series id.

    A loss that falls is always below its average, by more than its noise: measured against that average, a loss that
    doubles from one step to the next is only four deviations out.
    """

    def __init__(self) -> None:
        self._mean: dict[int, tuple[float, int]] = {}

    def deviations(self, ids: Iterable[int]) -> list[float]:
        """Return the deviation of each series in log units, infinite where it is not known yet."""
        found = (self._mean.get(i, (math.inf, 0)) for i in ids)
        return [mean * TO_DEVIATION if count >= KNOWN else math.inf for mean, count in found]

    def learn(self, ids: Iterable[int], jump: Floats) -> None:
        """Take in the moves of healthy samples, shape (n,)."""
        for series_id, move in zip(ids, jump.tolist(), strict=True):
            mean, count = self._mean.get(series_id, (0.0, 0))
            size = min(abs(move), CLIP * mean) if count >= KNOWN else abs(move)
            self._mean[series_id] = (mean + (size - mean) / min(count + 1, MEMORY), count + 1)

    def saved(self) -> dict[str, list[float]]:
        """Return plain data, by series id."""
        return {str(i): [mean, count] for i, (mean, count) in self._mean.items()}

    def adopt(self, series_id: int, saved: Mapping[str, list[float]], place: int) -> None:
        """Restore a series from the saved one with the id `place`."""
        if str(place) in saved:
            mean, count = saved[str(place)]
            self._mean[series_id] = float(mean), int(count)
