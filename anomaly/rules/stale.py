"""A tensor that should move and does not: a batch given again and again, a gradient or a state that is a copy."""

import math
from collections import Counter, defaultdict, deque
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import DUPLICATE_DATA, STALE, Anomaly
from trainsentry.anomaly.called_modules import CalledModules
from trainsentry.anomaly.features import FEW
from trainsentry.anomaly.finding import DATA, Finding
from trainsentry.anomaly.rules.optimizer.recorded_options import ByParameter
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.series import (
    ACTIVATION_OUTPUT,
    ACTIVATION_QUANTITIES,
    BUFFER,
    GRADIENT,
    GRADIENT_UNREDUCED,
    STEP_COUNTER,
    Series,
)
from trainsentry.collectors.statistics import INFS, MAX, MEAN, MIN, NANS, NORM, STATISTICS

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as float64 sums of a tensor that moved never repeat by chance."""

VARIED_BEFORE: Final = 6
"""Samples in which a series must have moved before: masks, positions and averages that have settled do not."""

INPUTS_BEFORE: Final = 16
"""The same for the model's inputs, which are sampled at every step: some are equal in most batches."""

REPEATS: Final = 2
"""Samples equal to the one before that make a finding; a loader that echoes each batch by design repeats from its first
steps on, and then twice its longest repetition counts."""

MASK_REPEATS: Final = 8
"""The same for an input of two values, such as a mask: as many elements are hidden in a few batches by chance."""

RECENT: Final = 8
CHANCE: Final = 1e-7
"""Batches of an input to which a new one is compared, and the probability below which one that repeats is no chance. A
few labels of a few classes have the same sums again and again, and of flags that are seldom set one is set: where new
batches equal earlier ones, their share says how many repetitions chance makes."""

ECHOES: Final = 0.9
"""Share of batches that come equally often, from which a loader repeats each by design."""

GRADIENT_REPEATS: Final = 1
MANY_ELEMENTS: Final = 64
"""The same for a gradient of so many elements beside others that move: weights move at each update, so no batch gives
one gradient twice. A bias under a loss that counts, as of absolute differences, may have the same few counts again."""

BUFFER_REPEATS: Final = 5
"""The same for a buffer: some hold a few levels, as a router's bias that moves by fixed steps, and rest at times."""

LEAST_ELEMENTS: Final = 4
"""Elements of a tensor that is judged, where it is no input: those of small inputs, as of labels, repeat by chance."""

MOVING_PEERS: Final = 0.5
"""Share of a quantity's other series that must move: where none does, nothing was computed or nothing was updated."""

TWO_VALUES: Final = 1e-9
"""Largest mean of (x − min)(x − max), as a share of the squared range, of tensors that hold two values: rounding."""

MAY_REST: Final = frozenset({STEP_COUNTER, "max_exp_avg_sq", "step_size"})
"""State that is not judged: counts of steps, largest values so far (amsgrad), and step sizes between bounds (Rprop)."""

SUMS_OF_SQUARES: Final = frozenset({"sum", "accum"})
"""State that adds up squares of gradients (Adagrad)."""

RESOLUTION: Final = {"float32": 2.0**-23, "float64": 2.0**-52}
"""Dtypes of state that is judged, as in narrower ones an average stops when its changes are below their resolution; a
square of at least this share of the largest sum changes that sum. An expert that gets next to nothing has smaller ones
for some steps."""

_TOLD: Final = -(2**30)
"""Stands in place of the number of repetitions of a stretch that was reported."""

_OTHER, _GRADIENT, _ACTIVATION, _STATE, _BUFFER, _INPUT = range(6)
_REPEATS: Final = np.array([REPEATS, GRADIENT_REPEATS, REPEATS, REPEATS, BUFFER_REPEATS, REPEATS])


class _Batches:
    """Prints of an input's newest batches that differ, and how often a new one was among them."""

    def __init__(self) -> None:
        self._newest: deque[int] = deque(maxlen=RECENT)
        self._seen = self._again = 0
        self._runs: Counter[int] = Counter()

    def note(self, fingerprint: int, repeats: int) -> None:
        """Take in a batch that is another than the one before, which came `repeats` times more."""
        self._seen += 1
        self._runs[min(repeats, RECENT)] += 1
        self._again += fingerprint in self._newest
        self._newest.append(fingerprint)

    @property
    def by_chance(self) -> int:
        """Repetitions in a row that chance does not make."""
        if not self._seen:
            return REPEATS
        length, times = self._runs.most_common(1)[0]
        repeated = sum(length * times for length, times in self._runs.items())
        by_design = length > 0 and times >= ECHOES * self._seen  # each batch comes as often as the others
        of_runs = 0.0 if by_design else repeated / (self._seen + repeated)
        share = max(self._again / (RECENT * self._seen), of_runs)
        return max(REPEATS, math.ceil(math.log(CHANCE) / math.log(share))) if share else REPEATS


class StaleRule(Rule):
    """Compares each sample's statistics with those of the sample before, exactly.

    Weights are not judged: frozen ones stay by design. State is judged where its parameter had a gradient since its
    last sample, as state of a parameter that is frozen later, or of an expert without tokens, stays by design too. So
    do buffers of a module that is called no more, as a teacher or a head that is trained for a while. An activation has
    moved where it is other than the sample before in the same shape: rotary positions follow from the shape alone.
    """

    name: ClassVar[str] = "stale"
    speaks_for: ClassVar[str | None] = STALE
    quantities: ClassVar[frozenset[str]] = frozenset(
        {GRADIENT, GRADIENT_UNREDUCED, BUFFER, OPTIMIZER_STATE} | ACTIVATION_QUANTITIES
    )
    statistics: ClassVar[frozenset[str]] = frozenset(STATISTICS)

    def __init__(self, arrays: SeriesArrays) -> None:
        self._table, self._called = arrays.table, CalledModules(arrays)
        self._kind = arrays.series.column(np.int8, of=_kind)
        self._owner = arrays.series.column(np.int64, -1, of=self._owner_of)
        self._owners: dict[str, int] = {}
        self._is_exact = arrays.layouts.column(bool, of=lambda layout: layout.dtype in RESOLUTION)
        self._resolution = arrays.layouts.column(np.float64, of=lambda layout: RESOLUTION.get(layout.dtype, 0.0))
        self._last = arrays.series.column(np.int64)
        self._layout = arrays.series.column(np.int64, -1)
        self._varied = arrays.series.column(np.int32)
        self._repeats = arrays.series.column(np.int32)
        self._longest = arrays.series.column(np.int32)
        self._since = arrays.series.column(np.int64, -1)
        self._step = -1
        self._sampled = arrays.series.column(np.int64, -1)
        # By owner: the largest square of the step's gradient, the step of the newest one, and the largest of all since
        # the state moved.
        self._gradients = ByParameter(3)
        self._adds_squares = arrays.series.column(bool, of=lambda s: s.quantity in SUMS_OF_SQUARES)
        self._inputs: dict[int, _Batches] = defaultdict(_Batches)

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the series that have not moved for so many samples, once each."""
        record, kinds = observed.record, self._kind.values[observed.record.where]
        self._note_gradients(observed, kinds)
        values = record.values
        least = np.where(kinds == _INPUT, FEW, LEAST_ELEMENTS)
        moves = (kinds != _OTHER) & ~observed.excused & (observed.numel >= least) & (values[:, NORM] > 0)
        moves &= (kinds != _STATE) | self._is_exact.values[record.layouts]
        rows = rows_where(moves & (values[:, NANS] + values[:, INFS] == 0))
        empty = record.ids[(kinds == _INPUT) & (values[:, NORM] == 0)]
        self._last.values[empty] = self._repeats.values[empty] = 0  # a batch without a flag is another one
        if not len(rows):
            return []
        ids, kinds = record.ids[rows].astype(np.int64), kinds[rows]
        layouts = record.layouts[rows].astype(np.int64)
        reshaped = (kinds == _ACTIVATION) & (layouts != self._layout.values[ids])
        self._layout.values[ids] = layouts
        least = self._resolution.values[layouts] * values[rows, MAX]
        same = self._follow(ids, record.prints[rows], least, reshaped, record.step)
        repeats = self._repeats.values[ids]
        fewest = np.where(observed.numel[rows] < MANY_ELEMENTS, np.maximum(_REPEATS[kinds], REPEATS), _REPEATS[kinds])
        inputs = rows_where(kinds == _INPUT)
        masks = inputs[_has_two_values(values[rows[inputs]], observed.numel[rows[inputs]])]
        fewest[masks] = MASK_REPEATS
        fewest[inputs] = np.maximum(fewest[inputs], [self._inputs[i].by_chance for i in ids[inputs].tolist()])
        enough = np.maximum(fewest, 2 * self._longest.values[ids])
        suspects = (repeats == enough) & (
            self._varied.values[ids] >= np.where(kinds == _INPUT, INPUTS_BEFORE, VARIED_BEFORE)
        )
        if not suspects.any():
            return []
        suspects &= (kinds == _INPUT) | self._peers_move(kinds, same)
        suspects &= (kinds == _INPUT) | ~_has_two_values(values[rows], observed.numel[rows])
        return [
            self._finding(int(ids[i]), int(rows[i]), float(values[rows[i], NORM]), data=bool(kinds[i] == _INPUT))
            for i in rows_where(suspects).tolist()
        ]

    def _note_gradients(self, observed: Observed, kinds: Integers) -> None:
        """Note when parameters had a gradient; this step's count from the next one on, as state is read first."""
        record = observed.record
        self._gradients.grow(len(self._owners))
        newest, had_at, squares = self._gradients.values
        if record.step != self._step:
            self._called.begin_step()
            came = rows_where(~np.isnan(newest))
            had_at[came] = self._step
            if record.step < self._step:  # the run has gone back
                squares[:] = np.nan
            squares[came] = np.fmax(squares[came], newest[came])
            self._step = record.step
            newest[:] = np.nan
        self._called.note(record)
        rows = rows_where((kinds == _GRADIENT) & (record.values[:, NORM] > 0))
        ends = record.values[rows[:, None], [MIN, MAX]]
        largest = np.fmax(np.abs(ends).max(axis=1), 0.0) ** 2
        np.fmax.at(newest, self._owner.values[record.ids[rows]], largest)

    def _follow(self, ids: Integers, prints: Integers, least: Floats, reshaped: Mask, step: int) -> Mask:
        """Take in the fingerprints of series; return which are those of the sample before.

        `least` are the least squares that change a series where it is a sum of squares, shape (n,).
        Those that are `reshaped` have another shape than in that sample, which says nothing of whether they move.
        State that had no gradient since then rests by right, and counts neither as moved nor as repeated.
        """
        last, repeats, longest = self._last.values, self._repeats.values, self._longest.values
        same: Mask = prints == last[ids]
        unmoved = zip(ids[same].tolist(), least[same].tolist(), strict=True)
        moved, still = ids[~same], np.array([i for i, square in unmoved if not self._rests(i, square)], np.int64)
        self._gradients.values[2, self._owner.values[moved[self._adds_squares.values[moved]]]] = np.nan
        longest[moved] = np.maximum(longest[moved], repeats[moved])
        for place in rows_where(~same & (self._kind.values[ids] == _INPUT)).tolist():
            self._inputs[int(ids[place])].note(int(prints[place]), max(int(repeats[ids[place]]), 0))
        repeats[moved] = 0
        self._varied.values[ids[~same & ~reshaped]] += 1
        self._since.values[still] = np.where(repeats[still] == 0, step, self._since.values[still])
        repeats[still] += 1
        last[ids], self._sampled.values[ids] = prints, step
        return same

    def _rests(self, series_id: int, least: float) -> bool:
        """Whether a series is state of a parameter without a gradient since its last sample, or of an idle module.

        A sum of squares rests too where all of them, since it moved, are below the `least` that changes it.
        """
        if self._kind.values[series_id] == _BUFFER:
            return self._called.knows_step and self._called.was_called(self._table.series[series_id]) is not True
        if self._kind.values[series_id] != _STATE:
            return False
        _, had_at, square = self._gradients.values[:, self._owner.values[series_id]]
        if self._adds_squares.values[series_id] and np.fmax(square, 0.0) < least:
            return True
        return bool(np.fmax(had_at, -1) < self._sampled.values[series_id])

    def _peers_move(self, kinds: Integers, same: Mask) -> Mask:
        """Return for each row whether most series of its kind moved in this record."""
        moved = np.bincount(kinds[~same], minlength=_INPUT + 1)
        return np.asarray(moved[kinds] >= MOVING_PEERS * np.bincount(kinds, minlength=_INPUT + 1)[kinds], bool)

    def _finding(self, series_id: int, row: int, norm: float, *, data: bool) -> Finding:
        since = int(self._since.values[series_id])
        self._repeats.values[series_id] = _TOLD  # the stretch is told once, and is no habit of this run
        kind = DUPLICATE_DATA if data else STALE
        detail = (kind, self.name, "norm", norm, norm, SCORE)
        return Finding(series_id, row, *detail, step=since, last_clean=since - 1, passed_on=None if data else False)

    def _owner_of(self, series: Series) -> int:
        return self._owners.setdefault(f"{series.vpp_stage} {series.name}", len(self._owners))

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return since when the tensor repeats."""
        if anomaly.quantity == DATA:
            return (
                f"{subject} is the same batch after batch since step {anomaly.step} (norm {anomaly.value:.6g}): the "
                "data loader repeats it"
            )
        return (
            f"{subject} does not move: it is exactly the same since step {anomaly.step} (norm {anomaly.value:.6g}), "
            "while others of its kind change"
        )


def _has_two_values(values: Floats, numel: Floats) -> Mask:
    """Return which tensors hold their least and their largest value alone, as masks do.

    Then (x − min)(x − max) is zero for each element, and so is its mean. What such tensors are told apart by is only
    how many elements have either value, which is the same for two batches by chance.
    """
    low, high = values[:, MIN], values[:, MAX]
    with np.errstate(over="ignore", invalid="ignore"):  # squares of values near the largest double
        inside = values[:, NORM] ** 2 / numel - (low + high) * values[:, MEAN] + low * high
        found: Mask = np.abs(inside) < TWO_VALUES * (high - low) ** 2
    return found


def _kind(series: Series) -> int:
    if series.scalar:
        return _OTHER
    if series.quantity in {GRADIENT, GRADIENT_UNREDUCED}:
        return _GRADIENT
    if series.is_model_input:
        return _INPUT
    if series.quantity == ACTIVATION_OUTPUT:
        return _ACTIVATION
    if series.quantity == BUFFER:
        return _BUFFER
    return _STATE if series.is_state and series.quantity not in MAY_REST else _OTHER
