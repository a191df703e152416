"""Soft rule: a magnitude far above what the series has shown so far."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.history import Floats, History, log_magnitudes
from trainsentry.anomaly.series_facts import Mask, SeriesFacts
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import PARAMETER, Series

NAME = "spike"

WARM_UP: Final = 5
"""Samples before a series is judged: the fewest for which a median and its deviation mean something."""

SCORE_LIMIT: Final = 8.0
"""Robust standard deviations on the log scale from which on a sample is a spike."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How a kind of series moves while nothing is wrong.

    `floor`: smallest deviation assumed, in natural log units; `young`: added to it, divided by the number of
    samples, for few samples say little about the spread; `ratio`: a spike is at least this many times the median,
    and this many times the sample before it.
    """

    floor: float
    young: float
    ratio: float


DEFAULT: Final = Sensitivity(floor=0.25, young=2.5, ratio=4.0)
"""Gradients, activations and updates: heavy-tailed, and far from stationary while the model warms up."""

WEIGHTS: Final = Sensitivity(floor=0.1, young=0.5, ratio=2.5)
"""Weights move by a few percent between two looks."""

STATE: Final = Sensitivity(floor=0.5, young=2.5, ratio=10.0)
"""Moments follow the gradients' squares: in healthy runs they rose 35-fold within forty steps."""

SCALAR: Final = Sensitivity(floor=0.06, young=0.5, ratio=1.5)
"""A loss moves little from step to step, and half as much again is much."""


class SpikeRule:
    """Robust z-score of log magnitudes: z = (log x − median) / max(1.4826·MAD, floor), over healthy samples.

    Median and MAD as location and scale: Hampel, "The influence curve and its role in robust estimation",
    JASA 1974. Only spikes upwards are reported here.
    """

    def __init__(self, facts: SeriesFacts, history: History) -> None:
        self.facts = facts
        self.history = history
        self._limits = np.zeros((0, 3))

    def scores(self, record: StepRecord) -> tuple[Floats, Floats, Floats]:
        """Return z of each row, its feature's index, and its median: arrays of shape (n,).

        z is 0 where there is nothing to judge: no history, or a zero or non-finite magnitude.
        """
        self.facts.refresh()
        self.history.grow(len(self.facts.scalar))
        new = self.facts.table.series[len(self._limits) :]
        if new:
            limits = [(x.floor, x.young, x.ratio) for x in map(_sensitivity, new)]
            self._limits = np.concatenate([self._limits, np.asarray(limits)])
        logs = log_magnitudes(record.values, self.facts.scalar[record.ids])
        centre, scale = self.history.centre_and_scale(record.ids)
        held = self.history.count[record.ids][:, None]
        own = self._limits[record.ids]
        floor = own[:, :1] + own[:, 1:2] / np.maximum(held, 1)
        with np.errstate(invalid="ignore"):
            distance = logs - centre
            z = distance / np.maximum(scale, floor)
            # A trend leads away from the median too; only a jump leads away from the sample before.
            jump = np.minimum(distance, logs - self.history.newest(record.ids))
        unknown = ~np.isfinite(z) | (held < WARM_UP) | ~(jump >= np.log(own[:, 2:]))
        z[unknown] = 0.0
        best = z.argmax(axis=1)
        rows = np.arange(len(record))
        return z[rows, best], best.astype(np.float64), centre[rows, best]

    def learn(self, record: StepRecord, healthy: Mask, outliers: Mask) -> None:
        """Take the healthy rows into the history, and note which rows stood out."""
        logs = log_magnitudes(record.values, self.facts.scalar[record.ids])
        known = healthy & np.isfinite(logs).all(axis=1)
        silent: npt.NDArray[np.int32] = record.ids[healthy & ~known]
        self.history.last_clean[silent] = record.step
        self.history.learn(record.ids[known], logs[known], record.step)
        self.history.note_outliers(record.ids[outliers])


def _sensitivity(series: Series) -> Sensitivity:
    if series.scalar:
        return SCALAR
    if series.is_state:
        return STATE
    return WEIGHTS if series.quantity == PARAMETER else DEFAULT
