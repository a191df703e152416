"""How improbable a step is, judged by the steps before it."""

import math
from collections import deque
from typing import Any, Final

import numpy as np

STEPS: Final = 8192
"""Steps that are remembered."""

QUANTILE: Final = 0.9
"""Beyond this quantile a tail is extrapolated."""

PRIOR_STEPS: Final = 50.0
"""Steps for which it is assumed that p-values are right: P(−log10 p > x) = 10^-x."""

PRIOR_EXCEEDING: Final = 10.0
"""Exceedances that the slope of that assumption counts for."""

REFIT_EVERY: Final = 32
"""Steps between two fits: the quantile of some thousand steps hardly moves."""


class Calibration:
    """P-value of a step's surprise −log10 p.

    p-values of many series are combined by Bonferroni's rule, which holds under any dependence but is too careful where
    series move together, and too bold where their noise is not what was assumed. The combined one is a single series:
    its own history says how often it is how small. Beyond the 90 % quantile it falls off exponentially (the tail of
    −log p of a power law is exponential; mean excess as the estimate: Pickands 1975), with a prior.
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
        self._share = max(len(excess), 1) / len(values)  # less than the rest of the quantile where most are nothing
        prior = 1 / np.log(10.0)
        self._slope = float((excess.sum() + PRIOR_EXCEEDING * prior) / (len(excess) + PRIOR_EXCEEDING))
        self._fitted = self._learned

    def saved(self) -> list[float]:
        """Return plain data."""
        return list(self._seen)

    def load(self, saved: list[Any]) -> None:
        """Go on from what was saved."""
        self._seen = deque((float(x) for x in saved), maxlen=STEPS)
        self._learned = len(self._seen)
        self._fitted = -1
