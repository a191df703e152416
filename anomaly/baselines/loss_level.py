"""Finds a loss that is higher from one step on, though its swings hide it: by the order of its values alone."""

import math
from collections import deque
from dataclasses import dataclass, field
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

EVERY: Final = 4
REMEMBERED: Final = 512
"""Losses from one look at how far they have risen to the next, and how long a rise is remembered: trouble that a run
has got over does not excuse another for good."""

LEAST_SHARE: Final = 0.975
"""Least share of the pairs of a new and an old loss in which the new one is larger. In clean runs of supervised models
it came to 0.89 beside a rise of 15 %, in Q-learning to 0.93; policy gradients, whose losses cross zero, exceed it."""

LEAST_RISE: Final = 1.2
"""Least factor between the medians: a smaller rise wakes nobody."""

LEAST_GAP: Final = 0.9
"""Least distance of the new median above those of the old losses by eight, in the widths that these span (logarithms):
the losses of one rollout, or of one curriculum, are alike, so that eight of them are no eight independent ones. In PPO
it came to 0.76, in a WGAN to 0.67; faults whose loss this test told lay at 0.99 and more."""

TIMES_USUAL: Final = 1.5
"""Least rise, in logarithms, as a multiple of the largest rise over `NEW` losses that the run has had before."""

YOUNG: Final = 60
"""Losses before the first verdict: a run that begins may get worse before it gets better."""

SCORE: Final = 25.0
"""Deviations: above single spikes, below what rules know for certain."""


@dataclass(slots=True)
class _Losses:
    """The newest losses of a series with their steps, how many it has had, and how far they have risen lately.

    The newest rises wait in `rises` until a fault that they may show would have been told; then they are `usual`.
    """

    newest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=OLD + NEW))
    seen: int = 0
    rises: deque[float] = field(default_factory=deque)
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED // EVERY))

    @property
    def largest_rise(self) -> float:
        """The largest of the usual rises, 0 where the loss has only fallen."""
        return max(self.usual, default=0.0)

    def add(self, step: int, loss: float) -> None:
        """Append a loss; a run that goes back begins anew."""
        if self.newest and step < self.newest[-1][0]:
            self.newest.clear()
        self.newest.append((step, loss))
        self.seen += 1
        if len(self.newest) == OLD + NEW and self.seen >= YOUNG and self.seen % EVERY == 0:
            losses = np.array([value for _, value in self.newest])
            self.rises.append(float(np.log(np.median(losses[OLD:]) / np.median(losses[:OLD]))))
            if len(self.rises) > 1 + NEW // EVERY:
                self.usual.append(max(self.rises.popleft(), 0.0))

    def forget(self) -> None:
        """Forget the newest losses, whose rise has been told, or which have no level."""
        self.newest.clear()
        self.rises.clear()


class LossLevel:
    """Compares the newest losses with those before by the rank-sum test, which asks for no distribution.

    (Mann and Whitney, "On a test of whether one of two random variables is stochastically larger than the other",
    1947. Of 8 and 40 equally distributed values the share is 0.975 in one of five million cases.) Losses that are not
    positive, as those of policy gradients, have no level.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_loss = arrays.series.column(bool, of=is_loss)
        self._known: dict[int, _Losses] = {}

    def reset(self) -> None:
        """Forget all losses, after a change that the user has declared."""
        self._known.clear()

    def forget(self, series_id: int) -> None:
        """Forget the losses of a series, whose rise has been told."""
        if series_id in self._known:
            self._known[series_id].forget()

    def is_usual(self, finding: Finding) -> bool:
        """Whether the run's loss has risen nearly as far before as a finding says that it has now."""
        known = self._known.get(finding.series_id)
        if known is None or not 0 < finding.expected < finding.value:
            return False
        return math.log(finding.value / finding.expected) < TIMES_USUAL * known.largest_rise

    def judge(self, observed: Observed) -> list[Finding]:
        """Take in the losses of a record; return those that have risen, by the first step of the higher ones."""
        record, found = observed.record, []
        for row in rows_where(self._is_loss.values[record.where] & observed.judged).tolist():
            series_id, loss = int(record.ids[row]), float(record.values[row, VALUE])
            known = self._known.setdefault(series_id, _Losses())
            if not 0 < loss < np.inf:
                known.forget()
                continue
            known.add(record.step, loss)
            if len(known.newest) == OLD + NEW and known.seen >= YOUNG and (risen := _risen(known, series_id, row)):
                found.append(risen)
                known.forget()
        return found


def _risen(known: _Losses, series_id: int, row: int) -> Finding | None:
    """Return the finding of a loss that has risen, None for any other."""
    if min(known.newest[-1][1], known.newest[-2][1]) <= known.newest[0][1]:  # most losses of a run end here
        return None
    losses = np.array([loss for _, loss in known.newest])
    old, new = losses[:OLD], losses[OLD:]
    usual, level = float(np.median(old)), float(np.median(new))
    rise = max(math.log(LEAST_RISE), TIMES_USUAL * known.largest_rise)
    if level < math.exp(rise) * usual or float((new[:, None] > old).mean()) < LEAST_SHARE:
        return None
    usually = np.log(np.median(old.reshape(-1, NEW), axis=1))
    if np.log(level) - usually.max() < LEAST_GAP * np.ptp(usually):
        return None
    first = _first_higher(losses)
    steps = [step for step, _ in known.newest]
    detail = (SHIFT, LEVEL_SHIFTS, "max", float(losses[first]), usual, SCORE)
    return Finding(series_id, row, *detail, step=steps[first], last_clean=steps[first - 1], passed_on=False)


def _first_higher(losses: Floats) -> int:
    """Return the place between the levels, where the gap is widest: losses just before it may be high by chance."""
    places = range(OLD - NEW, OLD + NEW - 2)
    return max(places, key=lambda i: float(losses[i:].min() / losses[:i].max()))
