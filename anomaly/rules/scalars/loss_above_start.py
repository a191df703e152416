"""A loss that had fallen and is suddenly above the level at which training began: nothing of what was learned holds."""

from collections import deque
from typing import Any, ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, SPIKE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.data.data_dependence import DataDependence
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.scalars.declared_changes import DECLARED, DeclaredChanges
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import Series
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 40.0
"""Deviations: above every spike of healthy runs but those that the rule itself leaves to be a note."""

FIRST: Final = 5
"""Losses whose largest is the level at the start."""

RECENT: Final = 16
"""Newest losses to which a loss is compared."""

FALLEN: Final = 0.7
"""All recent losses must be below this share of the start: a loss that hovers near its start says nothing."""

RANGES: Final = 6.0
"""A loss must lie so many ranges of the recent ones (largest minus smallest) above the largest. The losses of a policy
gradient, which swing around zero, never do."""

LASTING: Final = 2
"""Steps above the start after which it is a new level and no spike."""

GIVEN_UP: Final = 32
"""Steps above the start after which it is what the training does."""

LOSS: Final = "loss"


class LossLevels:
    """The losses at the start of a training, and the newest ones; `above` counts the steps since it left them."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.above = 0

    def take(self, loss: float) -> bool:
        """Take in a finite loss; return whether it is above the start and had fallen far below it."""
        if len(self.first) < FIRST:
            self.first.append(loss)
            return False
        start = max(self.first)
        if self.above or self._jumps(loss, start):
            self.above = self.above + 1 if loss > start else 0
            if self.above > GIVEN_UP:
                self.recent.clear()
                self.above = 0
            if self.above:
                return True
        self.recent.append(loss)
        return False

    def _jumps(self, loss: float, start: float) -> bool:
        if len(self.recent) < RECENT or loss <= start:
            return False
        low, high = min(self.recent), max(self.recent)
        return low > 0 and high < FALLEN * start and loss > high + RANGES * (high - low)


def is_loss(series: Series) -> bool:
    """Whether a series is the loss that the training logs."""
    return series.scalar and series.name == LOSS and not series.micro_step


class LossAboveStartRule(Rule):
    """Follows the logged loss. Labels that no longer belong to their inputs, or weights that are lost, show at once.

    The baseline of the loss needs more evidence than one series has in a job of ten thousand; this bound holds for any
    training that has learned something. A single spike is a note, as that of all gradients. A change that the loop
    declares, as of the sequences' length, begins another training.
    """

    name: ClassVar[str] = "loss_above_start"
    quantities: ClassVar[frozenset[str]] = frozenset({LOSS, *DECLARED})
    statistics: ClassVar[frozenset[str]] = frozenset()
    state_key: ClassVar[str | None] = "loss_above_start"

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_loss = arrays.series.column(bool, of=is_loss)
        self._levels, self._data = LossLevels(), arrays.shared(DataDependence)
        self._declared = arrays.shared(DeclaredChanges)

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the loss that is above the start."""
        record = observed.record
        if self._declared.ends_stretch(record):
            self._levels = LossLevels()
        levels = self._levels
        found: list[Finding] = []
        for row in rows_where(self._is_loss.values[record.where]).tolist():
            loss = float(record.values[row, VALUE])
            if np.isfinite(loss) and levels.take(loss) and not self._data.is_high:
                kind = SHIFT if levels.above > LASTING else SPIKE
                start = max(levels.first)
                found.append(Finding(int(record.ids[row]), row, kind, self.name, "value", loss, start, SCORE))
        return found

    def saved(self, count: int) -> Any:
        """Return the first losses and the recent ones."""
        return {"first": list(self._levels.first), "recent": list(self._levels.recent)}

    def load(self, saved: Any) -> None:
        """Restore both."""
        self._levels.first = [float(x) for x in saved["first"]]
        self._levels.recent = deque((float(x) for x in saved["recent"]), maxlen=RECENT)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the loss, and that at the start."""
        return (
            f"{subject} is {anomaly.value:.4g} at step {anomaly.step}, above the {anomaly.expected:.4g} with which the "
            "training began, and had fallen far below it"
        )
