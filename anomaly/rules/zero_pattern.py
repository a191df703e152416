"""An activation of which a part was zero at every sample and nothing is any more, or the other way round."""

from dataclasses import replace
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.module_setting import Dropouts
from trainsentry.anomaly.rules.padding_zeros import PaddingZeros
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_INPUT, ACTIVATION_OUTPUT, SETTING, Series
from trainsentry.collectors.statistics import NORM, ZEROS

SCORE: Final = 50.0
"""Deviations: above every spike of healthy runs, below the rules whose bounds hold for any run."""

SAMPLES: Final = 6
SPAN: Final = 40
"""Samples, and steps from the first to the last of them, in which an output must have had zeros, or none: where
activations are sampled at every tenth step, levels are known only after three hundred."""

CONFIRMED: Final = 3
EQUAL: Final = 1.1
"""Samples in a row with the other pattern, and the largest quotient of their shares: a branch that is left out at
random makes whole samples zero, now more and now less. An output whose pattern has changed is followed no more."""

FEWEST: Final = 32
SHARE: Final = 0.05
"""Zero elements, and share of the output, that make a pattern: activations that saturate become zero one by one, and a
sum of rectified ones is zero at a few places until it is not."""

EXACT: Final = 4
"""Zero elements that make a pattern of an output that had none, where their number is the same in each sample: a kernel
that leaves out the edge of its output (a row of one channel) makes as many each time, and chance does not."""

FEWEST_OF_INPUT: Final = 8
"""Zero elements in each batch that make a pattern of the model's own input, whatever its share: as many tokens of one
number do not all go by chance."""

STEADY: Final = 2.0
"""Largest quotient of the shares of zeros of a pattern: what a mask or a rectifier gives is steady, what batches of
other lengths give is not."""

MOST_AT_ONCE: Final = 0.5
"""Share of a record's tensors up to which a change is a fault of some."""

_NONE, _SOME, _MIXED = range(3)


class ZeroPatternRule(Rule):
    """Notes of each activation whether a part of it is zero, as a mask, a rectifier or dropout makes.

    A mask that is lost, a leaking rectifier and a dead channel change that from one step to the next. What a function
    between two modules computes, such as the weights of attention, is an input of the second one; zeros that come to
    such an input may be a mask that begins on purpose, as of spectrograms. Gradients are left out, as a loss may stop
    to ask something of some samples. Nothing is said of others where zeros come to the model's own input, or go from
    it: that is the suspect of what follows, and no alarm.
    """

    name: ClassVar[str] = "zero_pattern"
    quantities: ClassVar[frozenset[str]] = frozenset({ACTIVATION_INPUT, ACTIVATION_OUTPUT, SETTING})
    statistics: ClassVar[frozenset[str]] = frozenset({"zeros"})

    def __init__(self, arrays: SeriesArrays) -> None:
        series = arrays.series
        self._dropouts = arrays.shared(Dropouts)
        self._follows = series.column(bool, of=_follows)
        self._is_input = series.column(bool, of=lambda s: s.is_model_input)
        self._is_given = series.column(bool, of=lambda s: s.quantity == ACTIVATION_INPUT and not s.is_model_input)
        self._pattern = series.column(np.int8, _MIXED)
        self._count, self._first = series.column(np.int64), series.column(np.int64)
        self._low, self._high = series.column(np.float64), series.column(np.float64)
        self._numel = series.column(np.float64)
        self._varies = series.column(bool)
        self._other, self._since = series.column(np.int64), series.column(np.int64)
        self._other_share = series.column(np.float64)
        self._steady_at = series.column(np.int64, -1)
        self._padding = PaddingZeros(arrays)
        self._padded_inputs: set[int] = set()
        self._full_inputs: set[int] = set()  # those that are padded no more

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the tensors whose pattern has changed, by the first sample of the other one."""
        record = observed.record
        if self._dropouts.are_changed_by(record):
            self._count.values[:] = 0
            self._padding.reset()
        finite = np.isfinite(record.columns[ZEROS]) & (record.columns[NORM] > 0)
        rows = rows_where(self._follows.values[record.where] & finite & (observed.numel >= FEWEST) & ~observed.excused)
        if not len(rows):
            return []
        ids, share = record.ids[rows].astype(np.int64), record.values[rows, ZEROS]
        count = share * observed.numel[rows]
        other_size = self._numel.values[ids] != observed.numel[rows]  # an expert, whose tokens are others each time
        self._count.values[ids[other_size]] = 0
        self._numel.values[ids] = observed.numel[rows]
        inputs = self._is_input.values[ids]
        some = ((count >= FEWEST) & (share >= SHARE)) | (inputs & (count >= FEWEST_OF_INPUT))
        now = np.where(count == 0, _NONE, np.where(some, _SOME, _MIXED))
        lost = self._padding.take_in(ids, share, now == _SOME, other_size, record.step)
        self._note_data(ids[inputs], share[inputs], lost[inputs])
        found = self._lost_masks(rows[lost], ids[lost]) if 0 < lost.sum() <= MOST_AT_ONCE * len(ids) else []
        changed = self._take_in(ids, now, share, record.step)
        if not changed.any():
            return found
        self._count.values[ids[changed]] = 0
        changed &= ~(self._is_given.values[ids] & (share > 0))
        of_input = changed & inputs
        if of_input.any():
            changed = of_input & (share == 0)
        elif changed.sum() > max(1, MOST_AT_ONCE * len(ids)):
            return found
        found += [self._finding(int(rows[i]), int(ids[i]), float(share[i])) for i in rows_where(changed).tolist()]
        return [replace(finding, alarm=False) for finding in found] if of_input.any() else found

    def _take_in(self, ids: Integers, now: Integers, share: Floats, step: int) -> Mask:
        """Count the samples of a pattern; return which have had the other one for long enough."""
        count, pattern, other = self._count.values, self._pattern.values, self._other.values
        low, high = self._low.values, self._high.values
        known = (count[ids] >= SAMPLES) & (step - self._first.values[ids] >= SPAN) & ~self._varies.values[ids]
        few = known & (pattern[ids] == _NONE) & (now == _MIXED) & (share * self._numel.values[ids] >= EXACT)
        now = np.where(few, _SOME, now)
        differs = known & (pattern[ids] != _MIXED) & (now != pattern[ids]) & (now != _MIXED)
        new = other[ids] == 0
        self._since.values[ids] = np.where(differs & new, step, self._since.values[ids])
        first_share = self._other_share.values[ids] = np.where(new, share, self._other_share.values[ids])
        is_like = (pattern[ids] == _NONE) | self._is_input.values[ids] | _are_within(STEADY, low[ids], high[ids], share)
        steady = (count[ids] > 0) & (now == pattern[ids]) & is_like
        begins = ~differs & ~steady
        self._varies.values[ids] |= (
            (~new & ~differs)  # it was another for a sample or two
            | (differs & ~_are_within(np.where(few, 1.0, EQUAL), first_share, share))
            | (begins & (count[ids] > 0) & (now != pattern[ids]))
        )
        other[ids] = np.where(differs, other[ids] + 1, 0)
        pattern[ids] = np.where(begins, now, pattern[ids])
        count[ids] = np.where(begins, now != _MIXED, count[ids] + steady)
        self._first.values[ids] = np.where(begins, step, self._first.values[ids])
        self._steady_at.values[ids[~differs]] = step
        low[ids] = np.where(begins, share, np.where(steady, np.minimum(low[ids], share), low[ids]))
        high[ids] = np.where(begins, share, np.where(steady, np.maximum(high[ids], share), high[ids]))
        changed: Mask = (other[ids] >= CONFIRMED) & ~self._varies.values[ids]
        return changed

    def _note_data(self, ids: Integers, share: Floats, lost: Mask) -> None:
        """Note which inputs of the model are padded, and which are no more."""
        self._padded_inputs.update(ids[self._padding.has_zeros(ids)].tolist())
        self._full_inputs.difference_update(ids[share > 0].tolist())
        self._full_inputs.update(ids[lost].tolist())

    def _lost_masks(self, rows: Integers, ids: Integers) -> list[Finding]:
        """Return the findings of tensors in which padding makes no zeros any more.

        They are no alarm where no input of the model showed it: then the data may be padded no more.
        """
        if self._full_inputs:
            return []
        found = []
        for row, series_id in zip(rows.tolist(), ids.tolist(), strict=True):
            usual, since, before = self._padding.told(series_id)
            found.append(
                Finding(
                    series_id,
                    row,
                    SHIFT,
                    self.name,
                    "zeros",
                    0.0,
                    usual,
                    SCORE,
                    step=since,
                    last_clean=before,
                    alarm=bool(self._padded_inputs),
                )
            )
        return found

    def _finding(self, row: int, series_id: int, share: float) -> Finding:
        usual = float(self._low.values[series_id] + self._high.values[series_id]) / 2
        since, before = int(self._since.values[series_id]), int(self._steady_at.values[series_id])
        return Finding(series_id, row, SHIFT, self.name, "zeros", share, usual, SCORE, step=since, last_clean=before)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return both shares of zeros."""
        if anomaly.value == 0:
            was = f"at every sample before, {anomaly.expected:.3g} of its elements were"
            return f"no element of {subject} is zero from step {anomaly.step} on; {was}"
        return f"{anomaly.value:.3g} of the elements of {subject} are zero from step {anomaly.step} on; none was before"


def _follows(series: Series) -> bool:
    return series.quantity in {ACTIVATION_INPUT, ACTIVATION_OUTPUT}


def _are_within(factor: float | Floats, *shares: Floats) -> Mask:
    """Return where the largest of several shares is at most so many times the least."""
    found: Mask = np.maximum.reduce(shares) <= factor * np.minimum.reduce(shares)
    return found
