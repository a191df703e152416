"""Whether a batch tells of the next ones: samples are not independent then, and a few are hardly more than one."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.features import FEW
from trainsentry.anomaly.rules.data import recurring_levels as levels
from trainsentry.anomaly.rules.data.recurring_levels import RECURRING, RECURS_STILL, recurring_levels
from trainsentry.anomaly.rules.data.rollouts import Batches, Rollouts
from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Floats, SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_GRAD_INPUT, PASSES_WITHOUT_GRADIENTS, Series
from trainsentry.collectors.shared.batch_rows import PART
from trainsentry.collectors.statistics import MEAN, NORM, VALUE

SAMPLES: Final = 64
FEWEST: Final = 32
LEFT_OUT: Final = 4
"""Samples of an input whose correlation is measured, at most and at least, and the newest ones that are left out: what
is being judged may itself have made them alike."""

KEPT: Final = levels.SAMPLES + LEFT_OUT
"""Samples of an input that are kept: levels that recur need more of them."""

EVERY: Final = 4
LASTS: Final = 128
"""Records with inputs between two measurements, and those for which inputs may change after one that found them
dependent: a policy that has settled observes alike for a while, until it changes again. Inputs of fewer than `FEW`
elements, such as the progress of the training, are no data."""

MOST_FOUND: Final = 4 * LASTS // EVERY
"""Measurements of an input that are remembered: those that count for what began up to `LASTS` records ago."""

SURPRISED: Final = 8
"""Updates after a rollout in which a new level of gradients is that of the new data, where they stay apart so long."""

DEPENDENT: Final = 0.4
"""Correlation of a batch's size with that of the batch before from which data are dependent: of 64 independent samples
it is that large once in a thousand cases. Four updates that share a rollout give 0.6."""


def correlation_with_next(values: Floats) -> float:
    """Return the correlation of each value with the one after it, 0 where they do not vary.

    >>> round(correlation_with_next(np.repeat([1.0, 4.0, 2.0, 6.0], 4)), 2)
    0.65
    >>> correlation_with_next(np.ones(8))
    0.0
    """
    apart = values - values.mean()
    total = float((apart**2).sum())
    return float((apart[1:] * apart[:-1]).sum()) / total if total > 0 else 0.0


class DataDependence:
    """Follows the sizes of the model's inputs, and says whether one's batches depend on those before them.

    A policy makes its own observations, and several updates use those of one rollout; records of one source follow each
    other where nobody shuffles them. Then a loss tells of its batch more than of the model, and levels come and go. A
    batch tells of the next one, or, where a rollout is shuffled and used for long, of the level of the next many. An
    input that gets a gradient is no data: what a pipeline's stage gets from the one before moves as that learns. Data
    whose gradient a penalty takes are left out with them, so that they excuse nothing.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_input = arrays.series.column(bool, of=lambda s: s.is_model_input and not s.micro_step)
        self._sizes: dict[int, deque[float]] = {}
        self._noted: StepRecord | None = None
        self._taken = 0
        self._found: dict[int, deque[int]] = {}
        self._recurring: set[int] = set()
        self._series = arrays.table.series
        self._computed: set[tuple[int, str]] = set()
        self._is_purged = True
        arrays.series.before_growth(self._note_new)
        self._is_passes = arrays.series.column(bool, of=lambda s: s.scalar and s.name == PASSES_WITHOUT_GRADIENTS)
        self._rollouts, self._rollout_at = Rollouts(), -1

    @property
    def is_high(self) -> bool:
        """Whether the last measurement found an input dependent."""
        return any(self._taken - times[-1] < EVERY for times in self._found.values())

    @property
    def is_gathered(self) -> bool:
        """Whether a policy gathers the data: each phase of updates has its own, and what layers compute follows it."""
        return self._rollouts.is_gathering

    def begins_rollout(self, step: int | None) -> bool:
        """Whether a step is one of the first updates by a policy's newest data: a critic is surprised by them."""
        return step is not None and self.is_gathered and 0 <= step - self._rollout_at < SURPRISED

    def was_high(self, series_id: int | None = None, ago: int = 0) -> bool:
        """Whether an input, or any without one, was dependent lately, up to so many records ago.

        What came since may itself have made its batches alike.
        """
        at = self._taken - ago
        of = self._found.values() if series_id is None else [self._found.get(series_id, ())]
        return any(at - LASTS <= found <= at for times in of for found in times)

    def note(self, observed: Observed) -> None:
        """Take in a record; what several rules ask for is taken in once."""
        record = observed.record
        if record is self._noted:
            return
        self._noted = record
        rows = rows_where(self._is_input.values[record.where] & (observed.numel >= FEW)).tolist()
        if self._computed:
            self._forget_computed()
            rows = [row for row in rows if _place(self._series[record.ids[row]]) not in self._computed]
        if not rows:
            return
        batches: dict[int, tuple[float, ...]] = {}
        for row in rows:
            series_id, root_mean_square = (
                int(record.ids[row]),
                float(record.values[row, NORM] / observed.numel[row] ** 0.5),
            )
            if 0 < root_mean_square < np.inf:
                sizes = self._sizes.setdefault(series_id, deque(maxlen=KEPT))
                sizes.append(math.log(root_mean_square))
                batches[series_id] = sizes[-1], float(record.values[row, MEAN]) / root_mean_square
        self._taken += 1
        self._note_rollouts(record, batches)
        if self._taken % EVERY == 0:
            for series_id, sizes in self._sizes.items():
                if self._are_dependent(series_id, np.array(sizes)[:-LEFT_OUT]):
                    self._found.setdefault(series_id, deque(maxlen=MOST_FOUND)).append(self._taken)

    def _note_new(self, _: int, new: Sequence[Series]) -> None:
        computed = {_place(series) for series in new if _is_gradient(series)}
        self._is_purged &= computed <= self._computed
        self._computed |= computed

    def _forget_computed(self) -> None:
        """Forget the inputs that have turned out to be no data."""
        if self._is_purged:
            return
        self._is_purged = True
        for series_id in {*self._sizes, *self._found, *self._recurring}:
            if _place(self._series[series_id]) in self._computed:
                self._sizes.pop(series_id, None)
                self._found.pop(series_id, None)
                self._recurring.discard(series_id)

    def _note_rollouts(self, record: StepRecord, batches: Batches) -> None:
        """Note whether the data of these updates have a level of their own, as those of one rollout do."""
        passes = float(record.values[self._is_passes.values[record.where], VALUE].sum())
        self._rollouts.note(passes, batches)
        self._rollout_at = record.step if passes > 0 else self._rollout_at
        if self.is_gathered:
            for series_id in batches:
                times = self._found.setdefault(series_id, deque(maxlen=MOST_FOUND))
                if not times or self._taken - times[-1] >= EVERY // 2:
                    times.append(self._taken)

    def _are_dependent(self, series_id: int, sizes: Floats) -> bool:
        least = RECURS_STILL if series_id in self._recurring else RECURRING
        if recurring_levels(sizes) >= least:
            self._recurring.add(series_id)
            return True
        self._recurring.discard(series_id)
        return len(sizes) >= FEWEST and correlation_with_next(sizes[-SAMPLES:]) >= DEPENDENT

    def saved(self, size: int) -> dict[str, Any]:
        """Return the count of records, which inputs are no data, and their sizes and when they were dependent."""
        sizes = {str(i): list(each) for i, each in self._sizes.items() if i < size}
        dependent = {str(i): list(times) for i, times in self._found.items() if i < size}
        rollouts = self._rollouts.saved()
        known = {"sizes": sizes, "dependent": dependent, "computed": sorted(self._computed)}
        return {"records": self._taken, "rollouts": rollouts, **known}

    def load(self, saved: dict[str, Any]) -> None:
        """Restore the count of records, and forget all series."""
        self._taken = int(saved["records"])
        self._sizes.clear()
        self._found.clear()
        self._recurring.clear()
        self._computed.update((stage, name) for stage, name in saved.get("computed", ()))
        self._rollouts, self._rollout_at = Rollouts(), -1
        if "rollouts" in saved:
            self._rollouts.load(saved["rollouts"])

    def adopt(self, series_id: int, saved: dict[str, Any], position: int) -> None:
        """Restore a series from `position` of the saved ones."""
        if sizes := saved["sizes"].get(str(position)):
            self._sizes[series_id] = deque(map(float, sizes), maxlen=KEPT)
        if dependent := saved["dependent"].get(str(position)):
            self._found[series_id] = deque(map(int, dependent), maxlen=MOST_FOUND)
        self._is_purged = False


def _is_gradient(series: Series) -> bool:
    return series.quantity == ACTIVATION_GRAD_INPUT and not series.module


def _place(series: Series) -> tuple[int, str]:
    return series.vpp_stage, series.name.removesuffix(f".{PART}")
