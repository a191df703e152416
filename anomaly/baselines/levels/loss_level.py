"""Finds a loss that is higher from one step on, though its swings hide it: by the order of its values alone."""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import LEVEL_SHIFTS, SHIFT
from trainsentry.anomaly.baselines.learned_loss import LearnedLoss
from trainsentry.anomaly.baselines.levels.rank_test import NEW, OLD, first_above, is_another_level, share_above
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.rules.scalars.loss_above_start import is_loss
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.statistics import VALUE

EVERY: Final = 4
REMEMBERED: Final = 512
"""Losses from one look at how far they have risen to the next, and how long a rise is remembered: trouble that a run
has got over does not excuse another for good."""

LEAST_RISE: Final = 1.2
"""Least factor between the medians: a smaller rise wakes nobody."""

LEAST_DISTANCE: Final = 2.5
"""Least distance of the new losses above the old ones, less their fall, in the widths of their swings. In 670 healthy
runs of 170 practices, losses that nothing had changed came to 2.4, of an adversary's net; faults whose loss this test
told lay at 3.2 and more."""

TIMES_USUAL: Final = 1.5
"""Least rise, in logarithms, as a multiple of the largest rise over `NEW` losses that the run has had before."""

LASTS: Final = 32
"""Losses for which a rise must last, beside the first ones, where the loss is still below a tenth of its first values:
training without clipping rises so by up to twentyfold now and then, and is back after some thirty steps."""

YOUNG: Final = 60
"""Losses before the first verdict: a run that begins may get worse before it gets better."""

SCORE: Final = 25.0
"""Deviations: above single spikes, below what rules know for certain."""

WORSE: Final = 0.75
BESIDE: Final = 16
FEWEST_WORSE: Final = 6
"""Least share of the pairs of one of the `NEW` first losses since some step, of which so many must be known, and of one
of so many before, in which the later one is larger, where something else has changed at that step. Without a change
it comes to it once in thirty times, and more often where the step is not known and several are tried."""


@dataclass(slots=True)
class _Losses:
    """The newest losses of a series with their steps, how many it has had, and how far they have risen lately.

    The newest rises wait in `rises` until a fault that they may show would have been told; then they are `usual`.
    `risen_at` is the step of the last rise that was told. `waits` is one that may pass, with the number of losses at
    which it is told if it lasts.
    """

    newest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=OLD + NEW))
    seen: int = 0
    rises: deque[float] = field(default_factory=deque)
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED // EVERY))
    risen_at: int = -1
    waits: tuple[Finding, int] | None = None

    @property
    def largest_rise(self) -> float:
        """The largest of the usual rises, 0 where the loss has only fallen."""
        return max(self.usual, default=0.0)

    def add(self, step: int, loss: float) -> None:
        """Append a loss; a run that goes back begins anew."""
        if self.newest and step < self.newest[-1][0]:
            self.forget()
            self.risen_at = -1
        self.newest.append((step, loss))
        self.seen += 1
        if len(self.newest) == OLD + NEW and self.seen >= YOUNG and self.seen % EVERY == 0:
            losses = np.array([value for _, value in self.newest])
            self.rises.append(float(np.log(np.median(losses[OLD:]) / np.median(losses[:OLD]))))
            while len(self.rises) > 1 + NEW // EVERY and self.waits is None:
                self.usual.append(max(self.rises.popleft(), 0.0))

    def forget(self) -> None:
        """Forget the newest losses, whose rise has been told, or which have no level."""
        self.newest.clear()
        self.rises.clear()
        self.waits = None

    def are_worse_since(self, step: int) -> bool:
        """Whether the first losses from a step on are mostly above the last ones before it, or were told to be."""
        if 0 <= self.risen_at - step < NEW:
            return True
        new = np.array([loss for at, loss in self.newest if at >= step][:NEW])
        old = np.array([loss for at, loss in self.newest if at < step][-BESIDE:])
        return len(new) >= FEWEST_WORSE and len(old) == BESIDE and share_above(old, new) >= WORSE


class LossLevel:
    """Compares the newest losses with those before by the rank-sum test.

    Losses that are not positive, as those of policy gradients, have no level.
    """

    def __init__(self, arrays: SeriesArrays, learned: LearnedLoss) -> None:
        self._is_loss = arrays.series.column(bool, of=is_loss)
        self._learned = learned
        self._known: dict[int, _Losses] = {}

    def reset(self) -> None:
        """Forget all losses, after a change that the user has declared."""
        self._known.clear()

    def note_told(self, finding: Finding) -> None:
        """Forget the losses of a series, whose rise has been told."""
        known = self._known.get(finding.series_id)
        if known is not None and finding.step is not None:
            known.forget()
            known.risen_at = finding.step

    def is_usual(self, finding: Finding) -> bool:
        """Whether the run's loss has risen nearly as far before as a finding says that it has now, or it may pass."""
        known = self._known.get(finding.series_id)
        if known is None or not 0 < finding.expected < finding.value:
            return False
        if self._is_learned(finding.series_id, finding.value):
            return True
        return math.log(finding.value / finding.expected) < TIMES_USUAL * known.largest_rise

    def is_worse_since(self, step: int, last: int | None = None) -> bool:
        """Whether the first losses from a step on are mostly above those before it, or so from a loss up to `last`."""
        last = step if last is None else last
        return any(
            known.are_worse_since(at)
            for known in self._known.values()
            for at in {step, *(at for at, _ in known.newest if step <= at <= last)}
        )

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
            risen = self._lasting(known, row) if known.waits else None
            if len(known.newest) == OLD + NEW and known.seen >= YOUNG and not known.waits and risen is None:
                risen = _risen(known, series_id, row)
                if risen is not None and self._is_learned(series_id, _median(known)):
                    known.waits, risen = (risen, known.seen + LASTS), None
            if risen is not None:
                found.append(risen)
                self.note_told(risen)
        return found

    def _is_learned(self, series_id: int, loss: float) -> bool:
        """Whether a loss is so far below the run's first ones that it may rise and fall again."""
        return bool(self._learned.below([series_id], np.array([math.log(loss)]))[0] > 0)

    def _lasting(self, known: _Losses, row: int) -> Finding | None:
        """Return a rise that was waited for, once it has lasted, or has come above the tenth of the first losses."""
        if known.waits is None:
            return None
        risen, until = known.waits
        is_learned = self._is_learned(risen.series_id, _median(known))
        if known.seen < until and is_learned:
            return None
        known.waits = None
        lasts = not is_learned or _median(known) >= LEAST_RISE * risen.expected
        return replace(risen, row=row) if lasts else None


def _median(known: _Losses) -> float:
    """Return the median of the newest losses."""
    return float(np.median([loss for _, loss in list(known.newest)[-NEW:]]))


def _risen(known: _Losses, series_id: int, row: int) -> Finding | None:
    """Return the finding of a loss that has risen, None for any other."""
    if min(known.newest[-1][1], known.newest[-2][1]) <= known.newest[0][1]:  # most losses of a run end here
        return None
    losses = np.log([loss for _, loss in known.newest])
    rise = max(math.log(LEAST_RISE), TIMES_USUAL * known.largest_rise)
    if not is_another_level(losses, rise, LEAST_DISTANCE, falls=True):
        return None
    first, usual = first_above(losses), float(np.exp(np.median(losses[:OLD])))
    (clean, _), (step, loss) = known.newest[first - 1], known.newest[first]
    detail = (SHIFT, LEVEL_SHIFTS, "max", loss, usual, SCORE)
    return Finding(series_id, row, *detail, step=step, last_clean=clean, passed_on=False)
