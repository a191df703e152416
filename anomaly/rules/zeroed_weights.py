"""A part of a weight that is zero at once, or that its updates leave out, although its gradient has no zeros there."""

from typing import Any, ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import DEAD, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.optimizer.weight_continuity import COARSEST, SPACING
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import Mask, SeriesArrays, rows_where
from trainsentry.collectors.series import GRADIENT, PARAMETER, UPDATE
from trainsentry.collectors.statistics import VALUE, ZEROS

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as sums of real numbers are zero by no chance."""

SAMPLES: Final = 6
"""Samples in which a weight had fewer zeros, or its updates had: some are zero when they begin, as adapters are."""

FEWEST: Final = 32
SHARE: Final = 0.05
"""Zero elements, and share of all, that are a part of a weight: a lost block, a shard of a table, the tail of a
kernel's grid."""

TIMES: Final = 4.0
"""Least growth of the number of zeros: a row of padding is zero by design, and dropped rows of a table are."""

CONFIRMED: Final = 3
"""Samples in a row in which updates must leave a part out: sparse gradients may miss it once."""

ABOVE_ROUNDING: Final = 64.0
"""Least size of updates, as a share of the weight, in spacings of numbers: at the end of a schedule they are rounded to
zero, first those of the weights that are near 1."""

MOST_AT_ONCE: Final = 0.25
"""Share of the weights up to which zeros are a fault of some: who prunes does it to most of them."""


class ZeroedWeightsRule(Rule):
    """Follows the share of zeros of each weight and of its updates, of which there are none but by design.

    A lost shard makes a part of one weight zero, at once. A kernel that leaves out the tail of its grid makes a part of
    each update zero, where the gradient is not. Gradients with zeros of their own excuse those of updates.
    """

    name: ClassVar[str] = "zeroed_weights"
    quantities: ClassVar[frozenset[str]] = frozenset({PARAMETER, UPDATE, GRADIENT})
    statistics: ClassVar[frozenset[str]] = frozenset({"zeros"})

    def __init__(self, arrays: SeriesArrays) -> None:
        series = arrays.series
        self._is_weight = series.column(bool, of=lambda s: s.quantity == PARAMETER and s.micro_step == 0)
        self._is_update = series.column(bool, of=lambda s: s.quantity == UPDATE and s.micro_step == 0)
        self._is_gradient = series.column(bool, of=lambda s: s.quantity == GRADIENT and s.micro_step == 0)
        self._samples, self._most = series.column(np.int64), series.column(np.float64)
        self._lasted, self._since = series.column(np.int64), series.column(np.int64, -1)
        self._clean = series.column(np.int64, -1)
        self._spacing = arrays.layouts.column(np.float64, of=lambda layout: SPACING.get(layout.dtype, COARSEST))

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the weights of which a part has become zero, and those of which updates leave a part out."""
        return self._of_weights(observed) + self._of_updates(observed)

    def _of_weights(self, observed: Observed) -> list[Finding]:
        rows = rows_where(self._is_weight.values[observed.record.where])
        if not len(rows):
            return []
        ids = observed.record.ids[rows]
        odd = self._has_more(observed, rows) & (observed.record.values[rows, ZEROS] < 1)  # a whole one is set anew
        found = []
        if 0 < odd.sum() <= max(1, MOST_AT_ONCE * len(rows)):
            found = [self._finding(observed, int(rows[i]), observed.record.step) for i in rows_where(odd).tolist()]
        self._learn(observed, rows)
        self._clean.values[ids] = observed.record.step
        return found

    def _of_updates(self, observed: Observed) -> list[Finding]:
        record = observed.record
        rows = rows_where(self._is_update.values[record.where])
        if not len(rows):
            return []
        ids = record.ids[rows]
        odd = self._has_more(observed, rows)
        if odd.any():
            odd &= ~self._are_excused(observed, rows)
        lasted = self._lasted.values
        self._since.values[ids] = np.where(odd & (lasted[ids] == 0), record.step, self._since.values[ids])
        lasted[ids] = np.where(odd, lasted[ids] + 1, 0)
        self._clean.values[ids[~odd]] = record.step
        due = lasted[ids] == CONFIRMED
        found = []
        if 0 < due.sum() <= max(1, MOST_AT_ONCE * len(rows)):
            found = [self._finding(observed, int(rows[i]), int(self._since.values[ids[i]])) for i in rows_where(due)]
        self._learn(observed, rows[~odd | due])
        return found

    def _has_more(self, observed: Observed, rows: Any) -> Mask:
        """Return which rows have far more zeros than at any sample before."""
        ids, share = observed.record.ids[rows], observed.record.values[rows, ZEROS]
        most = self._most.values[ids]
        found: Mask = (share * observed.numel[rows] >= FEWEST) & (share >= SHARE) & (share > TIMES * most)
        found &= self._samples.values[ids] >= SAMPLES
        return found

    def _learn(self, observed: Observed, rows: Any) -> None:
        ids, share = observed.record.ids[rows], observed.record.values[rows, ZEROS]
        self._most.values[ids] = np.fmax(self._most.values[ids], share)
        self._samples.values[ids] += 1

    def _are_excused(self, observed: Observed, rows: Any) -> Mask:
        """Return which updates are rounded, have no more zeros than their gradients, or gradients nobody has read."""
        record, series = observed.record, observed.table.series
        gradients = rows_where(self._is_gradient.values[record.where]).tolist()
        zeros = {series[record.ids[row]].name: float(record.values[row, ZEROS]) for row in gradients}
        of_gradient = [zeros.get(series[record.ids[row]].name, np.inf) for row in rows.tolist()]
        least = ABOVE_ROUNDING * self._spacing.values[record.layouts[rows]]
        excused: Mask = TIMES * np.asarray(of_gradient) >= record.values[rows, ZEROS]
        excused |= ~(record.values[rows, VALUE] >= least)
        return excused

    def _finding(self, observed: Observed, row: int, step: int) -> Finding:
        series_id, share = int(observed.record.ids[row]), float(observed.record.values[row, ZEROS])
        most, clean = float(self._most.values[series_id]), int(self._clean.values[series_id])
        return Finding(series_id, row, DEAD, self.name, "zeros", share, most, SCORE, step=step, last_clean=clean)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the share of zeros, and the largest before."""
        before = f"at most {anomaly.expected:.3g} were before" if anomaly.expected else "none was before"
        if anomaly.quantity == UPDATE:
            return (
                f"the optimizer leaves out {anomaly.value:.3g} of the elements of {anomaly.name} since step "
                f"{anomaly.step}, although their gradients are not zero; {before}"
            )
        return f"{anomaly.value:.3g} of the elements of {subject} are exactly zero at step {anomaly.step}; {before}"
