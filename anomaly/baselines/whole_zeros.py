"""Tensors that are zero as a whole: a gradient for a moment, a weight until it is trained."""

from typing import Any, Final

import numpy as np

from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.rules.scalars.loss_above_start import is_loss
from trainsentry.anomaly.series_arrays import Floats, Mask, SeriesArrays
from trainsentry.collectors.series import ACTIVATION_GRAD_INPUT, ACTIVATION_GRAD_OUTPUT, GRADIENT
from trainsentry.collectors.statistics import VALUE, ZEROS

REST: Final = 1
USUAL_REST: Final = 8
"""Samples in a row in which a gradient may be zero as a whole; the second for one that was so before and came back, for
an input, and for a gradient inside the model, which is sampled more seldom. A step without a gradient harms no weight;
detectors of objects have it in a batch without an object."""

CHANCE: Final = 1e-6
"""Probability below which samples in a row are no chance, of an input that is left out by lot: twenty of one that is
zero in every other batch. Its share is taken by the rule of succession (Laplace, 1814)."""

MOST: Final = 0.5
"""Share of a record's gradients above which they do not rest: the loss itself is cut. Where the logged loss is zero
too, as that of a margin that all samples keep, all of them may."""

YOUNG: Final = 32
"""Samples that were not zero before an input that is zero as a whole is odd: hidden states begin so, and conditions are
left out by chance."""


_INSIDE: Final = frozenset({ACTIVATION_GRAD_INPUT, ACTIVATION_GRAD_OUTPUT})
_GRADIENTS: Final = _INSIDE | {GRADIENT}


class WholeZeros:
    """Follows for how many samples in a row each tensor has been zero as a whole.

    After `take_in`, `resting` masks the rows of gradients that rest, and of inputs that were so before and came back;
    `woken` masks those of tensors whose past was zero and says nothing of them: biases of a backbone that is trained
    from now on, a gradient that is back; shape (n,).
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_gradient = arrays.series.column(bool, of=lambda s: s.quantity in _GRADIENTS)
        self._is_inside = arrays.series.column(bool, of=lambda s: s.quantity in _INSIDE)
        self._is_input = arrays.series.column(bool, of=lambda s: s.is_model_input)
        self._is_loss = arrays.series.column(bool, of=is_loss)
        self._zero_for = arrays.series.column(np.int64)
        self._alive_for = arrays.series.column(np.int64)  # samples that were not zero: before some, none rests
        self._rested_for = arrays.series.column(np.int64)  # samples that were, in stretches that have ended
        self._has_rested = arrays.series.column(bool)
        self.resting: Mask = np.zeros(0, bool)
        self.woken: Mask = np.zeros(0, bool)

    def take_in(self, observed: Observed) -> None:
        """Take in a record."""
        record, where = observed.record, observed.record.where
        zero: Mask = (record.columns[ZEROS] == 1) & ~observed.facts.scalar[where] & ~observed.excused
        before = np.array(self._zero_for.values[where])  # which may be a view
        self.resting = self.woken = np.zeros(len(record), bool)
        if not zero.any() and not before.any():
            self._alive_for.values[record.ids] += 1
            return
        gradients, inputs = self._is_gradient.values[where], self._is_input.values[where]
        back = (before > 0) & ~zero & ~observed.excused
        longest = np.where(inputs, self._longest_rest(where), USUAL_REST)
        self.woken = back & (before > np.where(gradients | inputs, longest, REST))
        self._rested_for.values[record.ids[back]] += before[back]
        known = inputs | (self._alive_for.values[where] >= USUAL_REST)  # hidden states are zero in the very first step
        self._has_rested.values[record.ids[back & ~self.woken & known]] = True
        self._alive_for.values[record.ids[~zero]] += 1
        self._zero_for.values[record.ids] = np.where(zero, before + 1, np.where(observed.excused, before, 0))
        has_rested, alive_for = self._has_rested.values[where], self._alive_for.values[where]
        briefly = zero & (before < longest)
        self.resting = briefly & inputs & (alive_for > 0) & (has_rested | (alive_for < YOUNG))
        if (record.values[self._is_loss.values[where], VALUE] == 0).any():
            self.resting |= gradients & (briefly | (zero & has_rested))
        elif zero[gradients].any() and zero[gradients].mean() <= MOST:
            may_rest = has_rested | self._is_inside.values[where]
            self.resting |= zero & gradients & (before < np.where(may_rest, USUAL_REST, REST))

    def _longest_rest(self, where: Any) -> Floats:
        """Return for how many samples in a row each row's tensor may be zero, where they are zero by lot."""
        rested, alive = self._rested_for.values[where], self._alive_for.values[where]
        share = (rested + 1) / (rested + alive + 2)
        longest: Floats = np.maximum(USUAL_REST, np.log(CHANCE) / np.log(share))
        return longest
