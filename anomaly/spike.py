"""Soft rule: a magnitude far above what the series has shown so far."""

from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.history import Floats, History, log_magnitudes
from trainsentry.anomaly.series_facts import Mask, SeriesFacts
from trainsentry.collectors.record import StepRecord

NAME = "spike"

WARM_UP: Final = 5
"""Samples before a series is judged: the fewest for which a median and its deviation mean something."""

SCORE_LIMIT: Final = 8.0
"""Robust standard deviations on the log scale from which on a sample is a spike."""

RATIO_LIMIT: Final = 4.0
"""A spike is at least this many times the median, however calm the series was."""

SCALE_FLOOR: Final = 0.2
"""Smallest deviation assumed (natural log units): a calm series still moves by a fifth now and then."""

YOUNG_FLOOR: Final = 2.0
"""Added to the floor divided by the number of samples: five samples say little about the spread."""

JUDGED_SCALARS: Final = frozenset({"loss", "grad_norm"})
"""Logged scalars whose size means trouble; a learning rate or a temperature may jump by design."""


class SpikeRule:
    """Robust z-score of log magnitudes: z = (log x − median) / max(1.4826·MAD, floor), over healthy samples.

    Median and MAD as location and scale: Hampel, "The influence curve and its role in robust estimation",
    JASA 1974. Only spikes upwards are reported here.
    """

    def __init__(self, facts: SeriesFacts, history: History) -> None:
        self.facts = facts
        self.history = history

    def scores(self, record: StepRecord) -> tuple[Floats, Floats, Floats]:
        """Return z of each row, its feature's index, and its median: arrays of shape (n,).

        z is 0 where there is nothing to judge: no history, or a zero or non-finite magnitude.
        """
        self.facts.refresh()
        self.history.grow(len(self.facts.scalar))
        logs = log_magnitudes(record.values, self.facts.scalar[record.ids])
        centre, scale = self.history.centre_and_scale(record.ids)
        held = self.history.count[record.ids][:, None]
        floor = SCALE_FLOOR + YOUNG_FLOOR / np.maximum(held, 1)
        with np.errstate(invalid="ignore"):
            distance = logs - centre
            z = distance / np.maximum(scale, floor)
        unknown = ~np.isfinite(z) | (held < WARM_UP) | (distance < np.log(RATIO_LIMIT))
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
