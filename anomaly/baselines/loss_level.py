"""Finds a loss that is higher from one step on, though its swings hide it: by the order of its values alone."""

from collections import deque
from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import LEVEL_SHIFTS, SHIFT
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.loss_above_start import is_loss
from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Floats, SeriesArrays, rows_where
from trainsentry.collectors.statistics import VALUE

NEW: Final = 8
OLD: Final = 40
"""Losses that are compared with those before them: a spike of a healthy run is over after a few steps."""

LEAST_SHARE: Final = 0.975
"""Least share of the pairs of a new and an old loss in which the new one is larger. In clean runs of supervised models
it came to 0.89 beside a rise of 15 %, in Q-learning to 0.93; policy gradients, whose losses cross zero, exceed it."""

LEAST_RISE: Final = 1.2
"""Least factor between the medians: a smaller rise wakes nobody."""

YOUNG: Final = 60
"""Losses before the first verdict: a run that begins may get worse before it gets better."""

SCORE: Final = 25.0
"""Deviations: above single spikes, below what rules know for certain."""


class LossLevel:
    """Compares the newest losses with those before by the rank-sum test, which asks for no distribution.

    (Mann and Whitney, "On a test of whether one of two random variables is stochastically larger than the other",
    1947. Of 8 and 40 equally distributed values the share is 0.975 in one of five million cases.) Losses that are not
    positive, as those of policy gradients, have no level.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_loss = arrays.series.column(bool, of=is_loss)
        self._known: dict[int, deque[tuple[int, float]]] = {}
        self._seen: dict[int, int] = {}

    def reset(self) -> None:
        """Forget all losses, after a change that the user has declared."""
        self._known.clear()
        self._seen.clear()

    def forget(self, series_id: int) -> None:
        """Forget the losses of a series, whose rise has been told."""
        self._known.pop(series_id, None)

    def judge(self, observed: Observed) -> list[Finding]:
        """Take in the losses of a record; return those that have risen, by the first step of the higher ones."""
        record, found = observed.record, []
        for row in rows_where(self._is_loss.values[record.where] & observed.judged).tolist():
            series_id, loss = int(record.ids[row]), float(record.values[row, VALUE])
            known = self._known.setdefault(series_id, deque(maxlen=OLD + NEW))
            if known and record.step < known[-1][0]:  # the run went back
                known.clear()
            if not 0 < loss < np.inf:
                known.clear()
                continue
            known.append((record.step, loss))
            self._seen[series_id] = self._seen.get(series_id, 0) + 1
            if (
                len(known) == OLD + NEW
                and self._seen[series_id] >= YOUNG
                and (finding := _risen(known, series_id, row))
            ):
                found.append(finding)
                known.clear()
        return found


def _risen(known: deque[tuple[int, float]], series_id: int, row: int) -> Finding | None:
    """Return the finding of a loss that has risen, None for any other."""
    if min(known[-1][1], known[-2][1]) <= known[0][1]:  # most losses of a run end here
        return None
    losses = np.array([loss for _, loss in known])
    old, new = losses[:OLD], losses[OLD:]
    usual, level = float(np.median(old)), float(np.median(new))
    if level < LEAST_RISE * usual or float((new[:, None] > old).mean()) < LEAST_SHARE:
        return None
    first = _first_higher(losses)
    steps = [step for step, _ in known]
    detail = (SHIFT, LEVEL_SHIFTS, "max", float(losses[first]), usual, SCORE)
    return Finding(series_id, row, *detail, step=steps[first], last_clean=steps[first - 1], passed_on=False)


def _first_higher(losses: Floats) -> int:
    """Return the place between the levels, where the gap is widest: losses just before it may be high by chance."""
    places = range(OLD - NEW, OLD + NEW - 2)
    return max(places, key=lambda i: float(losses[i:].min() / losses[:i].max()))
