"""Invariant: a weight is what it was, plus its update; the means of the three are read anyway, and are linear."""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.anomaly.anomaly import SHIFT
from trainsentry.anomaly.finding import Finding
from trainsentry.collectors.record import StepRecord, as_index
from trainsentry.collectors.series import PARAMETER, UPDATE, SeriesTable
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM

NAME: Final = "continuity"

SCORE: Final = 80.0
"""As an invariant's, below that of replicas: those say the same and name the rank by a second witness."""

HELD_FOR: Final = 16
"""Steps in a row in which it must have held: some loops clip or rescale weights after each update."""

MORE: Final = 8
"""How many times as long it must hold after each time that it did not: some loops prune every hundred steps."""

ROUNDING: Final = 1e-7
"""Gap of the means, in root mean squares of the weight, beyond which it was not rounding. Beyond what rounding does to
the update, twelve kinds of healthy runs in float32 and bfloat16 gave none at all; float64 sums of 10^8 elements may be
off by 1e-8. One element of a matrix of 1,000 × 1,000 must move by a tenth of a root mean square to be seen."""

HOLDS: Final = 1e-5
"""Gap up to which the invariant counts as held: what is read may be a rounded copy of the weight that is updated."""

BEYOND: Final = 20.0
"""How many times the largest gap of its own so far it must be besides, for the same reason."""

SPACING: Final = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}
COARSEST: Final = 2.0**-7
"""Relative spacing of numbers by dtype, and of any other (bfloat16): an update is a difference that was rounded so."""

WAIT: Final = 3
"""Samples after which a weight that was changed is told of. Where it is changed again meanwhile, or has come to a bound
and stays there, the loop does it: it clips or rescales weights, and the first time is no fault."""

Floats = npt.NDArray[np.floating[Any]]


@dataclass
class _Changed:
    """A weight that was changed at a step, and what is waited for."""

    step: int
    mean: float
    due: float
    bounds: tuple[float, float]
    left: int = WAIT


class WeightContinuityRule:
    """Finds a weight that something else than its update has changed between two steps that were both sampled.

    Several at once are somebody's intention: a checkpoint is loaded, averages are put in their place, a head is begun
    anew. What fails in memory changes one.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._weights: dict[tuple[str, int], int] = {}
        self._is_weight = np.zeros(0, bool)
        self._weight_of = np.zeros(0, np.int64)
        self._again_of = np.zeros(0, np.int64)  # updates of a second turn within a step: the sum would need both
        self._takes_turns = False
        self._mean, self._due = np.zeros(0), np.zeros(0)
        self._read_at, self._due_after = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._held, self._needed = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._largest, self._slack = np.zeros(0), np.zeros(0)
        self._bounds = np.zeros((2, 0))
        self._spacing = np.zeros(0)
        self._changed: dict[int, _Changed] = {}

    def judge(self, record: StepRecord, numel: Floats) -> list[Finding]:
        """Return the weights that are not what they were to be; `numel` counts the elements of each row."""
        self._refresh()
        found: list[Finding] = []
        weights = np.flatnonzero(self._is_weight[record.where])
        if len(weights):
            rows, ids = (
                as_index(weights.astype(np.int32)),
                as_index(record.ids[weights]),
            )  # as slices, where they make no copies
            size = _root_mean_square(record, rows, numel)
            found = self._compare(record, weights, record.ids[rows], size)
            self._mean[ids], self._read_at[ids] = record.columns[MEAN, rows], record.step
            self._bounds[0, ids], self._bounds[1, ids] = record.columns[MIN, rows], record.columns[MAX, rows]
        updates = np.flatnonzero(self._weight_of[record.where] >= 0)
        if len(updates):
            self._expect(record, updates, numel)
        if self._takes_turns:
            again = self._again_of[record.where]
            self._due_after[again[again >= 0]] = -2
        return found

    def _expect(self, record: StepRecord, updates: Any, numel: Floats) -> None:
        """Note what weights are to be after their updates."""
        rows, ids = as_index(updates.astype(np.int32)), as_index(self._weight_of[record.ids[updates]].astype(np.int32))
        due = self._mean[ids] + record.columns[MEAN, rows]
        slack = self._spacing[record.layouts[rows]] * _root_mean_square(record, rows, numel)
        self._due[ids], self._slack[ids] = due, slack
        self._due_after[ids] = np.where(self._read_at[ids] == record.step, record.step, self._due_after[ids])

    def _compare(self, record: StepRecord, rows: Any, ids: Any, size: Floats) -> list[Finding]:
        now = record.columns[MEAN, rows]
        due, known = self._due[ids], self._due_after[ids] == record.step - 1
        if not known.any():
            return []
        with np.errstate(invalid="ignore", divide="ignore"):
            gap = np.maximum(np.abs(now - due) - self._slack[ids], 0.0) / np.maximum(size, np.abs(due))
        known &= np.isfinite(gap)
        if not known.all():
            rows, ids, gap = rows[known], ids[known], gap[known]
        broken = gap > np.maximum(ROUNDING, BEYOND * self._largest[ids])
        odd = broken & (self._held[ids] >= self._needed[ids]) & (self._largest[ids] <= HOLDS)
        self._largest[ids] = np.where(odd, self._largest[ids], np.maximum(self._largest[ids], gap))
        self._held[ids] = np.where(broken, 0, self._held[ids] + 1)
        self._needed[ids[odd]] *= MORE  # what comes back now and then is how this run is made
        found = self._confirmed(record, rows, ids, broken) if self._changed else []
        if broken.sum() == 1 and odd.any():
            self._note_change(record, int(rows[odd][0]), int(ids[odd][0]))
        return found

    def _note_change(self, record: StepRecord, row: int, series_id: int) -> None:
        low, high, mean = record.values[row, [MIN, MAX, MEAN]].tolist()
        before = self._bounds[:, series_id].tolist()
        bounds = (low if low != before[0] else math.nan, high if high != before[1] else math.nan)
        self._changed[series_id] = _Changed(record.step, mean, float(self._due[series_id]), bounds)

    def _confirmed(self, record: StepRecord, rows: Any, ids: Any, broken: Any) -> list[Finding]:
        """Return the weights that were changed some samples ago, once, and go on as they are."""
        found = []
        for series_id, changed in list(self._changed.items()):
            at = np.flatnonzero(ids == series_id)
            if record.step <= changed.step or broken[at].any():
                del self._changed[series_id]
            elif len(at):
                row = int(rows[at[0]])
                changed.left -= 1
                if (record.values[row, [MIN, MAX]] == changed.bounds).any():
                    del self._changed[series_id]
                elif not changed.left:
                    del self._changed[series_id]
                    found.append(_finding(series_id, row, changed))
        return found

    def _refresh(self) -> None:
        known = len(self._is_weight)
        new = self.table.series[known:]
        layouts = self.table.layouts[len(self._spacing) :]
        if layouts:
            self._spacing = np.append(self._spacing, [_spacing_of(layout.dtype) for layout in layouts])
        if not new:
            return
        for i, series in enumerate(new, known):
            if series.quantity == PARAMETER and series.micro_step == 0:
                self._weights[series.name, series.vpp_stage] = i
        of = [self._weights.get((s.name, s.vpp_stage), -1) if s.quantity == UPDATE else -1 for s in new]
        first = [s.micro_step == 0 for s in new]
        self._is_weight = np.append(self._is_weight, [s.quantity == PARAMETER and s.micro_step == 0 for s in new])
        self._weight_of = np.append(self._weight_of, np.where(first, of, -1))
        self._again_of = np.append(self._again_of, np.where(first, -1, of))
        self._takes_turns |= bool((self._again_of >= 0).any())
        self._mean, self._due = (np.append(x, np.zeros(len(new))) for x in (self._mean, self._due))
        self._largest, self._slack = (np.append(x, np.zeros(len(new))) for x in (self._largest, self._slack))
        never = np.full(len(new), -2)
        self._read_at, self._due_after = np.append(self._read_at, never), np.append(self._due_after, never)
        self._held = np.append(self._held, np.zeros(len(new), np.int64))
        self._needed = np.append(self._needed, np.full(len(new), HELD_FOR))
        self._bounds = np.append(self._bounds, np.zeros((2, len(new))), axis=1)


def _spacing_of(dtype: str) -> float:
    # What is read of complex numbers is of their magnitudes, whose mean is not linear.
    return math.nan if dtype.startswith("complex") else SPACING.get(dtype, COARSEST)


def _root_mean_square(record: StepRecord, rows: Any, numel: Floats) -> Floats:
    found: Floats = record.columns[NORM, rows] / np.sqrt(np.maximum(numel[rows], 1.0))  # a rank's part may be empty
    return found


def _finding(series_id: int, row: int, changed: _Changed) -> Finding:
    step, mean, due = changed.step, changed.mean, changed.due
    return Finding(series_id, row, SHIFT, NAME, "mean", mean, due, SCORE, step=step, last_clean=step - 1)
