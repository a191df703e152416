"""The tail of healthy scores, learned from the run."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.series_arrays import Floats

LOWEST: Final = 1.0
"""Scores up to this count as one."""

BINS_A_DECADE: Final = 32
BINS: Final = 4 * BINS_A_DECADE

EXCEEDING: Final = 60
"""Largest scores from which the tail is extrapolated: the fewest whose mean estimates an index."""

PRIOR_SAMPLES: Final = 400.0
"""Weight of the prior tail, in samples."""

PRIOR_INDEX: Final = 6.0
"""Index of the prior tail: P(score > x) ~ x^-6. In clean runs of small models scores fell faster than any power."""

PRIOR_WEIGHT: Final = 20.0
"""Weight of the prior index, in scores of the extrapolated tail."""

FORGET_AT: Final = 5e6
"""Samples at which all counts are halved, so that the tail follows a run of weeks."""


@dataclass(frozen=True, slots=True)
class Prior:
    """The prior tail: P(score > x) = share·(x / start)^-PRIOR_INDEX above `start`, and `share` below it."""

    start: float
    share: float


OF_TENSORS: Final = Prior(4.0, 1e-4)
OF_SCALARS: Final = Prior(4.0, 4e-3)
OF_COMMON: Final = Prior(4.0, 4e-3)
OF_DRIFTS: Final = Prior(12.0, 2e-4)
"""Two to ten times the shares of clean runs (`benchmarks/detection/clean_runs.py`, controls of `benchmarks/faults`)."""


class ScoreTail:
    """Survival function of scores ≥ 0, pooled over the series of a group.

    Counts in bins of log score; above the `EXCEEDING` largest scores a power law whose index is estimated from them
    (Hill, "A simple general approach to inference about the tail of a distribution", 1975), with a prior.

    >>> tail = ScoreTail()
    >>> bool(tail.survival(np.array([20.0]))[0] < 1e-3)
    True
    """

    def __init__(self, prior: Prior = OF_TENSORS) -> None:
        beyond = np.maximum(LOWEST * 10.0 ** (np.arange(BINS + 1) / BINS_A_DECADE) / prior.start, 1.0)
        self._assumed = PRIOR_SAMPLES * prior.share * beyond**-PRIOR_INDEX
        self.counts = np.zeros(BINS)
        self.total = 0.0

    def learn(self, scores: Floats, weight: float = 1.0) -> None:
        """Take in scores, of any shape; each counts for `weight` samples."""
        flat = scores.ravel()
        beyond = flat[flat > LOWEST]
        self.total += weight * flat.size
        if beyond.size:
            bins = np.minimum((np.log10(beyond / LOWEST) * BINS_A_DECADE).astype(np.intp), BINS - 1)
            self.counts += weight * np.bincount(bins, minlength=BINS)
        if self.total > FORGET_AT:
            self.counts /= 2
            self.total /= 2

    def survival(self, scores: Floats) -> Floats:
        """Return P(score > x) for each x: 1 below `LOWEST`, never 0."""
        above = np.append(np.cumsum(self.counts[::-1])[::-1], 0.0)
        edges = np.arange(BINS + 1)
        share = (above + self._assumed) / (self.total + PRIOR_SAMPLES)
        start = int(np.searchsorted(-above, -EXCEEDING, side="right")) - 1  # the last edge with so many scores above it
        at = np.log10(np.fmax(scores, LOWEST) / LOWEST) * BINS_A_DECADE
        at[np.isinf(at)] = BINS
        if start < 0:  # few samples so far: the prior
            assumed: Floats = np.where(scores > LOWEST, np.minimum(1.0, np.interp(at, edges, share)), 1.0)
            return assumed
        beyond = self.counts[start:]
        middle = (np.arange(len(beyond)) + 0.5) / BINS_A_DECADE * np.log(10.0)
        index = (beyond.sum() + PRIOR_WEIGHT) / (float(beyond @ middle) + PRIOR_WEIGHT / PRIOR_INDEX)
        out = share[start] * 10.0 ** (-index * np.maximum(at - start, 0.0) / BINS_A_DECADE)
        found: Floats = np.minimum(np.where(at > start, out, np.interp(at, edges, share)), 1.0)
        found[scores <= LOWEST] = 1.0
        return found

    def saved(self) -> dict[str, Any]:
        """Return plain data."""
        return {"counts": self.counts.tolist(), "total": self.total}

    def load(self, saved: dict[str, Any]) -> None:
        """Restore a saved tail."""
        self.counts = np.asarray(saved["counts"], np.float64)
        self.total = float(saved["total"])
