"""A learning rate far above all before it."""

import math
from typing import Any, ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import UPDATE_SIZE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.scalars.rate_changes import RATES
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as a schedule is set by a person."""

LEAST_RATIO: Final = 4.0
"""A new rate counts at this multiple of the largest rate so far: warm-ups double it at most, and restarts of a schedule
return to an earlier rate."""

SAMPLES_BEFORE: Final = 10
"""Samples of the learning rate before a jump counts."""


class LearningRateRule(Rule):
    """Compares each rate with the largest one so far."""

    name: ClassVar[str] = "learning_rate"
    speaks_for: ClassVar[str | None] = UPDATE_SIZE
    quantities: ClassVar[frozenset[str]] = frozenset(RATES)
    statistics: ClassVar[frozenset[str]] = frozenset()
    state_key: ClassVar[str | None] = "learning_rate"

    def __init__(self, arrays: SeriesArrays) -> None:
        numbers = {quantity: number for number, quantity in enumerate(RATES)}
        self._rate = arrays.series.column(np.int64, -1, of=lambda s: numbers.get(s.quantity, -1))
        self._largest = [(0.0, 0) for _ in RATES]  # each with the number of its samples

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding for each rate that is far above all before it."""
        record = observed.record
        rates = self._rate.values[record.where]
        found = []
        for row in rows_where(rates >= 0).tolist():
            rate, number = float(record.values[row, VALUE]), int(rates[row])
            largest, count = self._largest[number]
            if count >= SAMPLES_BEFORE and rate > LEAST_RATIO * largest > 0:
                detail = (UPDATE_SIZE, self.name, "value", rate, largest, SCORE)
                found.append(Finding(int(record.ids[row]), row, *detail, passed_on=False))
            self._largest[number] = max(largest, rate if math.isfinite(rate) else 0.0), count + 1
        return found

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the rate, and how many times the largest one before it is."""
        times = f"{anomaly.value / anomaly.expected:.3g} times" if anomaly.expected > 0 else "above"
        return f"{subject} is {anomaly.value:.3g} at step {anomaly.step}, {times} the largest before"

    def saved(self, count: int) -> list[float]:
        """Return the largest rates so far, each with its number of samples."""
        return [float(number) for rate in self._largest for number in rate]

    def load(self, saved: Any) -> None:
        """Restore the largest rates: a schedule that starts over after a restart is found."""
        for number, (largest, count) in enumerate(zip(saved[::2], saved[1::2], strict=False)):
            if number < len(RATES):
                self._largest[number] = float(largest), int(count)
