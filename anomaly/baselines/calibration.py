"""The p-value of a step, calibrated on the steps before it."""

import math
from collections import deque
from typing import Any, Final

import numpy as np

STEPS: Final = 8192
"""Newest steps that are remembered."""

QUANTILE: Final = 0.9
"""Above this quantile the tail is extrapolated."""

PRIOR_STEPS: Final = 50.0
"""Weight of the prior, in steps, that p-values are right: P(−log10 p > x) = 10^-x."""

PRIOR_EXCEEDING: Final = 10.0
"""Weight of the prior's slope, in steps above the quantile."""

REFIT_EVERY: Final = 32
"""Steps between two fits: the quantile of some thousand steps hardly moves."""


class Calibration:
    """P-value of a step's surprise −log10 p.

    p-values of many series are combined by Bonferroni's rule, which holds under any dependence but is too careful where
    series move together, and too bold where their noise differs from the assumed one. The combined p-value is a single
    series, and its own history shows how often it is how small. Above the 90 % quantile its tail is exponential (as
    −log p of a power law is; estimated by the mean excess, Pickands 1975), with a prior.
    """

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=STEPS)
        self._start = self._slope = 0.0
        self._share = 1 - QUANTILE
        self._fitted = -1
        self._learned = 0

    def p_value(self, surprise: float) -> float:
        """Return P(surprise > x)."""
        n = len(self._seen)
        assumed = math.pow(10.0, -surprise)
        if n == 0:
            return min(1.0, assumed)
        if self._fitted < 0 or self._learned - self._fitted >= min(REFIT_EVERY, n):
            self._fit()
        if surprise <= self._start:
            observed = self._share
        else:
            observed = self._share * math.exp(-(surprise - self._start) / self._slope)
        return min(1.0, (n * observed + PRIOR_STEPS * assumed) / (n + PRIOR_STEPS))

    def learn(self, surprise: float) -> None:
        """Take in the surprise of a healthy step."""
        self._seen.append(surprise)
        self._learned += 1

    def _fit(self) -> None:
        values = np.asarray(self._seen)
        self._start = float(np.quantile(values, QUANTILE))
        excess = values[values > self._start] - self._start
        self._share = max(len(excess), 1) / len(values)  # below 10 % where most values are equal
        prior = 1 / np.log(10.0)
        self._slope = float((excess.sum() + PRIOR_EXCEEDING * prior) / (len(excess) + PRIOR_EXCEEDING))
        self._fitted = self._learned

    def saved(self) -> list[float]:
        """Return plain data."""
        return list(self._seen)

    def load(self, saved: list[Any]) -> None:
        """Restore saved steps."""
        self._seen = deque((float(x) for x in saved), maxlen=STEPS)
        self._learned = len(self._seen)
        self._fitted = -1
