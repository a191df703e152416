"""A weight that was modified outside the optimizer update: its mean is not the mean before plus that of its update."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import FROZEN, SHIFT, Anomaly
from trainsentry.anomaly.finding import ALL, Finding
from trainsentry.anomaly.rules.optimizer.frozen import LEAST_RATIO
from trainsentry.anomaly.rules.precision import BITS, significant_bits
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord, as_index
from trainsentry.collectors.series import OUTSIDE_WRITES, PARAMETER, UPDATE, WRITTEN_LARGEST, WRITTEN_NORM, Series
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM, VALUE

SCORE: Final = 80.0
"""Deviations: as strong as a rule whose bound holds for any run, below replicas, which have a second witness."""

HELD_FOR: Final = 16
"""Steps in a row in which it must have held: some loops clip or rescale weights after each update."""

LONGER: Final = 8
"""Factor on `HELD_FOR` after each break: some loops prune every hundred steps."""

ROUNDING: Final = 1e-7
"""Gap of the means, in root mean squares of the weight, above which it is no rounding. Beyond what rounding does to
the update, twelve kinds of healthy runs in float32 and bfloat16 had none at all; float64 sums of 10^8 elements may be
off by 1e-8. One element of a matrix of 1,000 × 1,000 must move by a tenth of a root mean square to be seen."""

HOLDS: Final = 1e-5
"""Gap up to which it holds: the weight that is read may be a rounded copy of the one that is updated."""

LARGEST_TIMES: Final = 20.0
"""A gap must also be this many times the largest one of the weight so far, for the same reason."""

SPACING: Final = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}
COARSEST: Final = 2.0**-7
"""Relative spacing of numbers by dtype, and of any other (bfloat16): an update is a difference that was rounded so."""

MOST_AT_ONCE: Final = 0.25
"""Share of the weights up to which a modification of several is a fault: experts in another order, a layer of another
checkpoint. Who loads a checkpoint, or swaps averages in, changes them all."""

WAIT: Final = 3
"""Samples between a modification and its finding. A loop that clips or rescales weights shows meanwhile: it modifies
the weight again, or the weight stays at a bound."""

LASTING: Final = 8
"""Samples in a row in which a weight must be modified before it is told, where it is modified again and again."""

MOVED_BEFORE: Final = 6
MANY_ELEMENTS: Final = 64
"""Samples in a row in which a weight must have moved, and its elements, before one counts that is exactly as the sample
before although an update has moved it since: its statistics are the same by no chance."""

AS_AT_FIRST: Final = 0.3
"""Least size of the first of these modifications, as a share of their median: a bound on weights, as `max_norm` of
embeddings, begins with the few that pass it first."""

SAME_NORM: Final = 1e-5
"""Relative change of a norm that is none: a loop that holds a weight at a norm modifies it at each step by design."""

WRITTEN: Final = (WRITTEN_NORM, WRITTEN_LARGEST)
SIZES: Final = 3
"""The scalars of the size of a weight that something writes to again and again, and how many of each come."""

WRITES: Final = "writes"
"""The statistic of a weight whose modification is known by torch's count of writes alone."""

NEVER: Final = -2
"""A step that never was, and is not the step before the first one either."""


@dataclass
class _Modification:
    """A modification of a weight that waits to be confirmed for `left` more samples."""

    step: int
    mean: float
    expected: float
    bounds: tuple[float, float]
    limit: float
    gaps: list[float]
    left: int = WAIT
    held_norm: int = 0

    @property
    def is_lasting(self) -> bool:
        """Whether the weight is modified again and again, and not to keep it within a bound."""
        if len(self.gaps) < LASTING or 2 * self.held_norm >= len(self.gaps):
            return False
        return self.gaps[0] >= AS_AT_FIRST * statistics.median(self.gaps)


class WeightContinuityRule(Rule):
    """Finds a weight that was modified between two sampled steps, other than by its update.

    Most weights at once are somebody's intention: a checkpoint is loaded, averages are swapped in. It is no alarm, but
    the first suspect where one follows; so is a weight that torch has counted a write to, between samples too, which
    becomes an alarm where that goes on and does not hold the weight at a size. Faulty
    memory changes one, and a mix-up a few. A weight that is modified again and again counts unless that keeps it within
    a bound. The updates of one that is exactly what it was at the sample before are lost.
    """

    name: ClassVar[str] = "continuity"
    quantities: ClassVar[frozenset[str]] = frozenset({PARAMETER, UPDATE, OUTSIDE_WRITES, WRITTEN_NORM, WRITTEN_LARGEST})
    statistics: ClassVar[frozenset[str]] = frozenset({"mean", "norm", "min", "max"})
    settles_ties: ClassVar[bool] = True

    def __init__(self, arrays: SeriesArrays) -> None:
        self._weights: dict[tuple[str, int], int] = {}
        arrays.series.before_growth(self._note_weights)
        series = arrays.series
        self._is_write = series.column(bool, of=lambda s: s.scalar and s.name.partition(".")[0] == OUTSIDE_WRITES)
        self._is_weight = series.column(bool, of=lambda s: s.quantity == PARAMETER and s.micro_step == 0)
        self._weight_of = series.column(np.int64, of=lambda s: self._updated_by(s) if s.micro_step == 0 else -1)
        # Updates of a second turn within a step: the sum would need both.
        self._again_of = series.column(np.int64, of=lambda s: -1 if s.micro_step == 0 else self._updated_by(s))
        self._takes_turns = False
        self._mean, self._expected = series.column(np.float64), series.column(np.float64)
        self._read_at, self._expected_after = series.column(np.int64, NEVER), series.column(np.int64, NEVER)
        self._held, self._needed = series.column(np.int64), series.column(np.int64, HELD_FOR)
        self._largest_gap, self._slack = series.column(np.float64), series.column(np.float64)
        self._bounds, self._norm = series.column(np.float64, shape=(2,)), series.column(np.float64)
        self._moves, self._moved = series.column(bool), series.column(np.int64)
        self._spacing = arrays.layouts.column(np.float64, of=lambda layout: _spacing_of(layout.dtype))
        self._modified: dict[int, _Modification] = {}
        self._is_size = series.column(bool, of=lambda s: s.scalar and s.name.partition(".")[0] in WRITTEN)
        self._written_at: dict[str, int] = {}
        self._sizes: dict[str, dict[str, list[float]]] = {}
        self._told: set[str] = set()  # weights of which more is known than that they were written to

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the weights that were modified `WAIT` samples ago."""
        record = observed.record
        found: list[Finding] = []
        weights = rows_where(self._is_weight.values[record.where])
        if len(weights):
            # Slices make no copies.
            rows, ids = as_index(weights.astype(np.int32)), as_index(record.ids[weights])
            size = _root_mean_square(record, rows, observed.numel)
            found = self._unmoved(observed, weights, record.ids[rows])
            found += self._compare(record, weights, record.ids[rows], size)
            self._mean.values[ids], self._read_at.values[ids] = record.columns[MEAN, rows], record.step
            self._bounds.values[0, ids] = record.columns[MIN, rows]
            self._bounds.values[1, ids] = record.columns[MAX, rows]
            self._norm.values[ids] = record.columns[NORM, rows]
        updates = rows_where(self._weight_of.values[record.where] >= 0)
        if len(updates):
            self._expect(record, updates, observed.numel)
        if self._takes_turns:
            again = self._again_of.values[record.where]
            self._expected_after.values[again[again >= 0]] = NEVER
        self._told.update(observed.table.series[f.series_id].name for f in found if f.alarm)
        return [*found, *self._written(observed), *self._written_again(observed)]

    def _written(self, observed: Observed) -> list[Finding]:
        """Return the suspicions of weights that something else than their optimizer has written to."""
        record, found = observed.record, []
        rows = rows_where(self._is_write.values[record.where])
        if len(rows) > max(2, len(self._weights) / 2):  # each weight has an optimizer of its own
            return [self._written_to(record, int(rows[0]), ALL)]
        for row in rows.tolist():
            name = observed.table.series[int(record.ids[row])].name.partition(".")[2] or ALL
            found.append(self._written_to(record, row, name))
        return found

    def _written_to(self, record: StepRecord, row: int, name: str) -> Finding:
        self._written_at[name] = record.step
        where = {"last_clean": record.step - 1, "passed_on": False, "name": name, "quantity": PARAMETER}
        detail = (SHIFT, self.name, WRITES, float(record.values[row, VALUE]), 0.0, SCORE)
        return Finding(int(record.ids[row]), row, *detail, alarm=False, **where)  # type: ignore[arg-type]

    def _written_again(self, observed: Observed) -> list[Finding]:
        """Return the weights that something writes to again and again, and not to hold them at a norm or a bound."""
        record, found = observed.record, []
        for row in rows_where(self._is_size.values[record.where]).tolist():
            series_id, size = int(record.ids[row]), float(record.values[row, VALUE])
            prefix, _, name = observed.table.series[series_id].name.partition(".")
            sizes = self._sizes.setdefault(name, {}).setdefault(prefix, [])
            sizes.append(size)
            known = self._sizes[name]
            if prefix != WRITTEN_LARGEST or min(len(known.get(p, ())) for p in WRITTEN) < SIZES:
                continue
            del self._sizes[name]
            is_held = any(max(s) - min(s) <= SAME_NORM * max(s) for s in known.values())
            if not is_held and name not in self._told:
                since = self._written_at.get(name, record.step)
                where = {"step": since, "last_clean": since - 1, "passed_on": False}
                detail = (SHIFT, self.name, WRITES, sizes[-1], sizes[0], SCORE)
                found.append(Finding(series_id, row, *detail, **where, name=name, quantity=PARAMETER))  # type: ignore[arg-type]
        return found

    def _expect(self, record: StepRecord, updates: Any, numel: Floats) -> None:
        """Note the means that weights should have after their updates."""
        rows = as_index(updates.astype(np.int32))
        ids = as_index(self._weight_of.values[record.ids[updates]].astype(np.int32))
        self._expected.values[ids] = self._mean.values[ids] + record.columns[MEAN, rows]
        rounding = self._spacing.values[record.layouts[rows]]
        self._slack.values[ids] = rounding * _root_mean_square(record, rows, numel)
        self._moves.values[ids] = record.columns[VALUE, rows] > LEAST_RATIO
        after = self._expected_after.values
        after[ids] = np.where(self._read_at.values[ids] == record.step, record.step, after[ids])

    def _unmoved(self, observed: Observed, rows: Any, ids: Any) -> list[Finding]:
        """Return the weights that are exactly as at the sample before, although an update has moved them since."""
        record, moved = observed.record, self._moved.values
        before = [*self._bounds.values[:, ids], self._mean.values[ids], self._norm.values[ids]]
        same = np.all(
            [record.columns[c, rows] == b for c, b in zip((MIN, MAX, MEAN, NORM), before, strict=True)], axis=0
        )
        lost = same & self._moves.values[ids] & (self._read_at.values[ids] < record.step)
        is_fine = self._spacing.values[record.layouts[rows]] <= SPACING["float32"]  # in bfloat16 few elements move
        told = lost & is_fine & (moved[ids] >= MOVED_BEFORE) & (observed.numel[rows] >= MANY_ELEMENTS)
        moved[ids] = np.where(same, 0, moved[ids] + 1)
        self._moves.values[ids] = False
        if not 0 < told.sum() <= max(1, MOST_AT_ONCE * len(ids)):
            return []
        return [self._lost(record, int(rows[i]), int(ids[i])) for i in rows_where(told).tolist()]

    def _lost(self, record: StepRecord, row: int, series_id: int) -> Finding:
        mean, since = float(record.values[row, MEAN]), int(self._read_at.values[series_id])
        return Finding(series_id, row, FROZEN, self.name, "mean", mean, mean, SCORE, last_clean=since)

    def _compare(self, record: StepRecord, rows: Any, ids: Any, size: Floats) -> list[Finding]:
        """Compare the means with those expected after the step before."""
        mean, expected = record.columns[MEAN, rows], self._expected.values[ids]
        known = self._expected_after.values[ids] == record.step - 1
        if not known.any():
            return []
        with np.errstate(invalid="ignore", divide="ignore"):
            off = np.maximum(np.abs(mean - expected) - self._slack.values[ids], 0.0)
            gap = off / np.maximum(size, np.abs(expected))
        known &= np.isfinite(gap)
        if not known.all():
            rows, ids, gap = rows[known], ids[known], gap[known]
        held, needed, largest = self._held.values, self._needed.values, self._largest_gap.values
        limits = np.maximum(ROUNDING, LARGEST_TIMES * largest[ids])
        broken = gap > limits
        odd = broken & (held[ids] >= needed[ids]) & (largest[ids] <= HOLDS)
        waits = np.isin(ids, list(self._modified)) if self._modified else np.zeros(len(ids), bool)
        largest[ids] = np.where(odd | waits, largest[ids], np.maximum(largest[ids], gap))
        held[ids] = np.where(broken, 0, held[ids] + 1)
        needed[ids[odd]] *= LONGER  # a break that comes back now and then is the design of the run
        found = [f for i in rows_where(waits) if (f := self._go_on(record, int(rows[i]), int(ids[i]), float(gap[i])))]
        self._forget_after(record.step)
        if broken.sum() <= max(1, MOST_AT_ONCE * len(ids)):
            for i in rows_where(odd).tolist():
                self._note_modification(record, int(rows[i]), int(ids[i]), float(gap[i]), float(limits[i]))
        elif 2 * odd.sum() > len(ids):
            found.append(self._swapped(record, int(rows[odd][0]), int(ids[odd][0])))
        return found

    def _swapped(self, record: StepRecord, row: int, series_id: int) -> Finding:
        """Return the suspicion that most weights were modified, of which one is given."""
        mean, expected = float(record.values[row, MEAN]), float(self._expected.values[series_id])
        detail = (SHIFT, self.name, "mean", mean, expected, SCORE)
        return Finding(series_id, row, *detail, alarm=False, last_clean=record.step - 1, passed_on=False, name=ALL)

    def _note_modification(self, record: StepRecord, row: int, series_id: int, gap: float, limit: float) -> None:
        low, high, mean = record.values[row, [MIN, MAX, MEAN]].tolist()
        before = self._bounds.values[:, series_id].tolist()
        bounds = (low if low != before[0] else math.nan, high if high != before[1] else math.nan)
        expected = float(self._expected.values[series_id])
        modified = self._modified[series_id] = _Modification(record.step, mean, expected, bounds, limit, [gap])
        self._note_looks(record, row, series_id, modified)

    def _note_looks(self, record: StepRecord, row: int, series_id: int, modified: _Modification) -> None:
        """Note whether a modified weight has the norm that it had at the sample before."""
        norm, before = float(record.values[row, NORM]), float(self._norm.values[series_id])
        modified.held_norm += abs(norm - before) <= SAME_NORM * before

    def _go_on(self, record: StepRecord, row: int, series_id: int, gap: float) -> Finding | None:
        """Follow a modified weight; return it where it was modified once, `WAIT` samples ago, or goes on to be."""
        modified = self._modified[series_id]
        if record.step <= modified.step:
            return None
        once = len(modified.gaps) == 1
        if gap > modified.limit:
            modified.gaps.append(gap)
            self._note_looks(record, row, series_id, modified)
            ends = modified.left < WAIT or len(modified.gaps) >= LASTING
            told = modified.left == WAIT and modified.is_lasting
            told &= not self._is_rounded(record, row)
        else:
            modified.left -= 1
            is_bound = bool((record.values[row, [MIN, MAX]] == modified.bounds).any())
            ends, told = is_bound or not (once and modified.left), once and not is_bound and not modified.left
        if not ends:
            return None
        del self._modified[series_id]
        if len(modified.gaps) > 1:  # said once, or the design of the run
            self._largest_gap.values[series_id] = max(modified.gaps)
        return _finding(series_id, row, modified) if told else None

    def _is_rounded(self, record: StepRecord, row: int) -> bool:
        """Return whether a weight holds fewer bits than its dtype, which a rule of its own tells."""
        if self._spacing.values[record.layouts[row]] != SPACING["float32"]:
            return False
        return bool(significant_bits(np.abs(record.values[row, [MIN, MAX]])).max() <= BITS["float16"])

    def _forget_after(self, step: int) -> None:
        """Forget modifications of later steps: the run has gone back."""
        for series_id in [i for i, modified in self._modified.items() if modified.step >= step]:
            del self._modified[series_id]

    def _note_weights(self, first: int, new: Sequence[Series]) -> None:
        for i, series in enumerate(new, first):
            if series.quantity == PARAMETER and series.micro_step == 0:
                self._weights[series.name, series.vpp_stage] = i
        self._takes_turns |= any(s.micro_step > 0 and self._updated_by(s) >= 0 for s in new)

    def _updated_by(self, series: Series) -> int:
        """Return the id of the weight that an update changes; -1 for other series."""
        return self._weights.get((series.name, series.vpp_stage), -1) if series.quantity == UPDATE else -1

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the mean, and the mean expected of the update."""
        if anomaly.name == ALL:
            return (
                f"most parameters were modified outside the optimizer update before step {anomaly.step}: a checkpoint "
                "was loaded, or other weights were swapped in"
            )
        if anomaly.statistic == WRITES and anomaly.alarm:
            return f"something other than its optimizer writes to parameter {anomaly.name} before each update"
        if anomaly.statistic == WRITES:
            return f"parameter {anomaly.name} was written outside the optimizer update before step {anomaly.step}"
        if anomaly.kind == FROZEN:
            return f"parameter {anomaly.name} is exactly what it was at step {anomaly.last_clean}: its updates are lost"
        return (
            f"{subject} was modified outside the optimizer update before step {anomaly.step}: its mean is "
            f"{anomaly.value:.6g}, expected {anomaly.expected:.6g}"
        )


def _spacing_of(dtype: str) -> float:
    # The statistics of complex numbers are those of their magnitudes, whose mean is not linear.
    return math.nan if dtype.startswith("complex") else SPACING.get(dtype, COARSEST)


def _root_mean_square(record: StepRecord, rows: Any, numel: Floats) -> Floats:
    found: Floats = record.columns[NORM, rows] / np.sqrt(np.maximum(numel[rows], 1.0))  # a rank's part may be empty
    return found


def _finding(series_id: int, row: int, modified: _Modification) -> Finding:
    detail = (SHIFT, WeightContinuityRule.name, "mean", modified.mean, modified.expected, SCORE)
    return Finding(series_id, row, *detail, step=modified.step, last_clean=modified.step - 1)
