"""Whether a batch tells of the next one: samples are not independent then, and a few are hardly more than one."""

from collections import deque
from typing import Final

import numpy as np

from trainsentry.anomaly.features import FEW
from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Floats, SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.statistics import NORM

SAMPLES: Final = 64
FEWEST: Final = 32
LEFT_OUT: Final = 4
"""Samples of an input whose dependence is measured, at most and at least, and the newest ones that are left out: what
is being judged may itself have made them alike."""

EVERY: Final = 4
LASTS: Final = 128
"""Records with inputs between two measurements, and those for which inputs may change after one that found them
dependent: a policy that has settled observes alike for a while, until it changes again. Inputs of fewer than `FEW`
elements, such as the progress of the training, are no data."""

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
    """Follows the sizes of the model's inputs; `is_high` says whether one's batches depend on those before them.

    A policy makes its own observations, and several updates use those of one rollout; records of one source follow each
    other where nobody shuffles them. Then a loss tells of its batch more than of the model, and levels come and go.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_input = arrays.series.column(bool, of=lambda s: s.is_model_input and not s.micro_step)
        self._sizes: dict[int, deque[float]] = {}
        self._noted: StepRecord | None = None
        self._taken = 0
        self._found: dict[int, deque[int]] = {}
        self.is_high = False

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
        rows = rows_where(self._is_input.values[record.where] & (observed.numel >= FEW))
        if not len(rows):
            return
        for row in rows.tolist():
            norm = float(record.values[row, NORM])
            if 0 < norm < np.inf:
                sizes = self._sizes.setdefault(int(record.ids[row]), deque(maxlen=SAMPLES + LEFT_OUT))
                sizes.append(float(np.log(norm / np.sqrt(observed.numel[row]))))
        self._taken += 1
        if self._taken % EVERY == 0:
            known = {i: np.array(each)[:-LEFT_OUT] for i, each in self._sizes.items() if len(each) >= FEWEST + LEFT_OUT}
            found = [i for i, sizes in known.items() if correlation_with_next(sizes) >= DEPENDENT]
            for series_id in found:
                self._found.setdefault(series_id, deque(maxlen=2 * LASTS // EVERY)).append(self._taken)
            self.is_high = bool(found)
