"""Optimizer state that does not follow from its own past and the gradients: the optimizer does what it says."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import RECURRENCE, STATE_RESET, Anomaly
from trainsentry.anomaly.features import FEW
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.optimizer.recorded_options import ByParameter, ParameterNumbers, RecordedOptions
from trainsentry.anomaly.rules.optimizer.residuals import SCORE, ResidualBounds, Residuals, nearest
from trainsentry.anomaly.rules.optimizer.state_recurrences import MOST_WAYS, RECURRENCES, ways_of
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.series_arrays import Column, Floats, Integers, SeriesArrays, rows_where
from trainsentry.collectors.series import GRADIENT, OPTION, OWN_STEP, PARAMETER, STEP_COUNTER, Series
from trainsentry.collectors.statistics import INFS, MAX, MEAN, MIN, NANS, NORM

BOUNDS: Final = ResidualBounds(least=3e-4, largest=0.02, learned=4)
"""Shares of the state's root mean square: float32 sums leave 1e-6, and decay of weights, whose means are known at
samples only, 1e-5. Not every optimizer keeps state of these names by these recurrences, so four samples must have
followed."""

FOLLOWS: Final = 3e-5
"""Residual up to which a state follows all of its gradients: one element that is clipped leaves more, or nothing after
some steps."""

MOST_LOST: Final = 0.8
"""Share of the states that follow no more which must follow from zero, at one and the same step."""

LONGEST_TRAIL: Final = 32
LARGEST_TRAIL: Final = 2**21
"""Steps between two samples for which it is known what the states were, and numbers that are kept for it: 16 MB, which
is ten steps of seventeen thousand states."""

_KINDS: Final = tuple(RECURRENCES)
_NONE, _COUNTER, _GRADIENT, _WEIGHT = -4, -3, -2, -1


class RecurrenceRule(Rule):
    """Follows the mean of each state from sample to sample by the gradients of the steps between.

    The recurrences of momentum and of averages are linear, so that they hold for means; the mean of squares is known
    from the norm. Gradients must be sampled at every step, as they are by default; state need not be. What the options
    of each group give is tried, with and without decay of weights inside the gradient (SGD, Adam): the group of a
    parameter is not known here. Decay inside a square has a mixed term, which counts as 0: it is learned as a residual.
    Where most states follow no more, as after a checkpoint was loaded, nothing is said, unless they follow from zero.
    """

    name: ClassVar[str] = "recurrence"
    speaks_for: ClassVar[str | None] = RECURRENCE
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT, PARAMETER, OPTION, OPTIMIZER_STATE})
    statistics: ClassVar[frozenset[str]] = frozenset({"mean", "norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._owners = ParameterNumbers()
        self._kind = arrays.series.column(np.int8, _NONE, of=_kind)
        self._owner = arrays.series.column(np.int64, -1, of=self._owner_of)
        self._options = RecordedOptions(arrays)
        # By owner: mean, mean square and elements of the pending gradient (NaN: none), and the weight's first two.
        self._pending = ByParameter(3)
        self._weight = ByParameter(2)
        self._updates = ByParameter(1)  # how many the optimizer has made, by its own counter
        # By state series: the predicted mean by each way; and by name of states, how many ways there are.
        self._predicted: Column[Series] = arrays.series.column(np.float64, np.nan, shape=(MOST_WAYS,))
        self._before: Column[Series] = arrays.series.column(np.float64, np.nan)
        self._number_of_ways: dict[str, int] = {}
        self._numel = arrays.series.column(np.float64)
        # By owner: the largest element and norm of the step's gradient, of those since the last sample of its states,
        # and of those that were followed.
        self._size, self._sizes, self._known_sizes = ByParameter(2), ByParameter(2), ByParameter(2)
        self._compared: list[Integers] = []
        self._is_own_step = arrays.series.column(bool, of=lambda s: s.scalar and s.name.startswith(f"{OWN_STEP}."))
        self._has_own_step = False
        self._residuals = Residuals(arrays, BOUNDS, self.name)
        self._states: Integers = np.zeros(0, np.int64)
        self._by_kind: list[tuple[int, Integers]] = []
        self._step = -1
        # How much of a state's last sample is left; and that with the predicted mean, by step since the sample.
        self._left: Column[Series] = arrays.series.column(np.float64, 1.0, shape=(MOST_WAYS,))
        self._trail: list[tuple[int, Floats, Floats]] = []
        self._is_sampled = False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the states that do not follow from the sample before; a step may come in several records."""
        record = observed.record
        if record.step != self._step:
            self._advance(record.step)
        self._note(observed)
        kinds = self._kind.values[record.where]
        rows = rows_where((kinds >= 0) & (observed.numel >= FEW))
        if not len(rows):
            return []
        ids = record.ids[rows].astype(np.int64)
        means = record.values[rows, MEAN]
        rms = record.values[rows, NORM] / np.sqrt(observed.numel[rows])
        squares = np.asarray([recurrence.squares for recurrence in RECURRENCES.values()])[kinds[rows]]
        scale = np.where(squares, np.abs(means), rms)
        findings = [] if record.examined else self._compare(ids, rows, means, scale)
        self._predicted.values[:, ids] = np.nan if record.examined else means
        self._before.values[ids] = means
        self._numel.values[ids] = observed.numel[rows]
        self._follow(ids)
        self._is_sampled = True
        return findings

    def _follow(self, ids: Integers) -> None:
        """Follow these states too from now on."""
        states = np.union1d(self._states, ids)
        if len(states) > len(self._states):
            kinds, self._states = self._kind.values[states], states
            self._trail.clear()  # it is of fewer states
            self._by_kind = [(int(number), states[kinds == number]) for number in np.unique(kinds)]

    def _compare(self, ids: Integers, rows: Integers, means: Floats, scale: Floats) -> list[Finding]:
        """Compare states with what was predicted; learn the residuals of those that follow."""
        predicted, residuals = nearest(self._predicted.values[:, ids], means, scale)
        if self._has_own_step:
            residuals = self._where_known(self._owner.values[ids], residuals)
        with np.errstate(divide="ignore", invalid="ignore"):
            changes = np.nan_to_num(np.abs(means - self._before.values[ids]) / scale)
        found = self._residuals.judge("mean", ids, rows, means, predicted, residuals, changes)
        wrong = self._residuals.most_wrong
        return found if wrong is None else self._lost(ids[wrong], rows[wrong], means[wrong], scale[wrong])

    def _where_known(self, owners: Integers, residuals: Floats) -> Floats:
        """Return the residuals that say something, NaN for others, and learn the sizes of gradients that follow.

        An optimizer that is none of the framework's may clip inside its step: then it takes what was read until a
        gradient is larger than all before it.
        """
        sizes, known = self._sizes.get(owners), self._known_sizes.get(owners)
        fits, follows = residuals <= BOUNDS.least, residuals <= FOLLOWS
        grown = (sizes > known * (1 + BOUNDS.least)).any(axis=0)
        self._known_sizes.set(owners[follows], np.fmax(known, sizes)[:, follows])
        self._compared.append(owners)
        found: Floats = np.where(grown & ~fits, np.nan, residuals)
        return found

    def _lost(self, ids: Integers, rows: Integers, means: Floats, scale: Floats) -> list[Finding]:
        """Return the first of the states that follow from zero, if most of them do from one step on."""
        places = np.searchsorted(self._states, ids)
        for step, before, left in reversed(self._trail):
            with np.errstate(invalid="ignore", divide="ignore"):
                kept = self._left.values[:, ids] / left[:, places] * before[:, places]
            expected, residuals = nearest(self._predicted.values[:, ids] - kept, means, scale)
            fits = rows_where(residuals <= BOUNDS.least)
            if len(fits) >= MOST_LOST * len(ids):
                i = int(fits[0])
                detail = (STATE_RESET, self.name, "mean", float(means[i]), float(expected[i]), SCORE)
                return [Finding(int(ids[i]), int(rows[i]), *detail, step=step, last_clean=step - 1, passed_on=False)]
        return []

    def _note(self, observed: Observed) -> None:
        """Take in a record's options, gradients and weights."""
        record = observed.record
        self._options.note(observed)
        self._has_own_step |= bool(self._is_own_step.values[record.where].any())
        kinds = self._kind.values[record.where]
        values, owners = record.values, self._owner.values[record.where]
        rows = rows_where(kinds == _GRADIENT)
        if len(rows):
            size = np.maximum(observed.numel[rows], 1)
            taken = np.stack((values[rows, MEAN], values[rows, NORM] ** 2 / size, observed.numel[rows]))
            taken[:, (values[rows][:, [NANS, INFS]] > 0).any(axis=1)] = np.inf  # nothing is known of what follows
            self._pending.set(owners[rows], taken)
            largest = np.maximum(np.abs(values[rows, MIN]), np.abs(values[rows, MAX]))
            self._size.set(owners[rows], np.stack((largest, values[rows, NORM])))
        rows = rows_where(kinds == _COUNTER)
        self._updates.set(owners[rows], values[rows, MEAN][None])
        rows = rows_where(kinds == _WEIGHT)
        squares = values[rows, NORM] ** 2 / np.maximum(observed.numel[rows], 1)
        self._weight.set(owners[rows], np.stack((values[rows, MEAN], squares)))
        if self._options.updates_again(observed) or (self._options.several and self._options.skips(observed)):
            self._pending.values[:] = np.inf  # nothing is known of what follows
        elif self._options.skips(observed):
            self._pending.clear()

    def _advance(self, step: int) -> None:
        """Predict the states before a step from the gradients of the step before it."""
        states = self._states
        if self._is_sampled or step != self._step + 1:
            self._is_sampled = False
            self._trail.clear()
            self._left.values[:, states] = 1.0
        if step != self._step + 1:
            self._predicted.values[:, states] = np.nan
        else:
            for number, of_kind in self._by_kind:
                self._advance_kind(of_kind, _KINDS[number])
            owners = np.arange(self._updates.values.shape[1])
            self._updates.values[0, ~np.isnan(self._pending.get(owners)[0])] += 1
        numbers = 2 * MOST_WAYS * len(states) * (len(self._trail) + 1)
        if len(self._trail) < LONGEST_TRAIL and numbers <= LARGEST_TRAIL:
            self._trail.append((step, self._predicted.values[:, states], self._left.values[:, states]))
        self._pending.clear()
        for owners in self._compared:  # all states of a parameter, which may come in several records
            self._sizes.set(owners, np.full((2, len(owners)), np.nan))
        self._compared.clear()
        everyone = np.arange(self._size.values.shape[1])
        self._sizes.set(everyone, np.fmax(self._sizes.get(everyone), self._size.values))
        self._size.clear()
        self._step = step

    def _advance_kind(self, states: Integers, quantity: str) -> None:
        """Advance the predicted means of all states of one name, by each way that they may follow."""
        recurrence, predicted, owners = RECURRENCES[quantity], self._predicted.values, self._owner.values[states]
        ways = ways_of(recurrence, self._options)
        before, self._number_of_ways[quantity] = self._number_of_ways.get(quantity, len(ways)), len(ways)
        if len(ways) != before or not ways:  # they are others now: nothing is known until the next sample
            predicted[:, states] = np.nan
            return
        mean, square, numel = self._pending.get(owners)
        own = self._numel.values[states]
        fits = (numel >= own) if recurrence.lines else (numel == own)  # else the gradient is of another part
        unknown = (~fits & ~np.isnan(mean)) | np.isinf(mean)
        weights = self._weight.get(owners)
        new, left = np.full((MOST_WAYS, len(states)), np.nan), np.ones((MOST_WAYS, len(states)))
        for i, way in enumerate(ways):
            part = square + way.weight_decay**2 * weights[1] if recurrence.squares else way.sign * mean
            if way.weight_decay and not recurrence.squares:
                part = part + way.weight_decay * weights[0]
            gain = (self._updates.get(owners)[0] + 1) ** way.gain if recurrence.counted else way.gain
            decay = 1 - gain if recurrence.counted else way.decay
            new[i], left[i] = decay * predicted[i, states] + gain * part, decay
        new[:, unknown] = np.nan
        predicted[:, states] = np.where(np.isnan(mean), predicted[:, states], new)
        self._left.values[:, states] *= np.where(np.isnan(mean), 1.0, left)

    def _owner_of(self, series: Series) -> int:
        followed = series.quantity in RECURRENCES or series.quantity in {GRADIENT, PARAMETER, STEP_COUNTER}
        if series.scalar or not followed:
            return -1
        return self._owners.of(series)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the mean, and what the recurrence gives."""
        if anomaly.kind == STATE_RESET:
            return (
                f"the optimizer's state was lost by step {anomaly.step}: the mean of {subject}, {anomaly.value:.6g}, "
                "and those of the others are what the gradients since then give without any past"
            )
        return (
            f"the mean of {subject} is {anomaly.value:.6g} at step {anomaly.step}; its own past and the gradients "
            f"since then give {anomaly.expected:.6g}"
        )


def _kind(series: Series) -> int:
    if series.scalar or series.micro_step:
        return _NONE
    if series.quantity == GRADIENT:
        return _GRADIENT
    if series.quantity == PARAMETER:
        return _WEIGHT
    if series.quantity == STEP_COUNTER:
        return _COUNTER
    return _KINDS.index(series.quantity) if series.quantity in RECURRENCES and not series.index else _NONE
