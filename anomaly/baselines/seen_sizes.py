"""Sizes of inputs and gradients that a policy's own data have made before, and that are nothing new."""

from typing import Final

import numpy as np

from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Mask, SeriesArrays
from trainsentry.collectors.series import GRADIENT, Series
from trainsentry.collectors.statistics import MAX, MIN, NORM

MARGIN: Final = 1.5
"""Factor beyond the sizes of before within which a size is still familiar: extremes of so few episodes grow. A critic's
gradients came again at 0.5 to 1.1 times the largest of before, which a settled policy's are a hundredth of."""


class SeenSizes:
    """The least and the largest size of each input and gradient of a parameter, while data were dependent.

    A policy that has settled observes alike for thousands of updates, and then meets again what it met before.
    `familiar` says which rows of the last record are of such sizes, shape (n,).
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_followed = arrays.series.column(bool, of=_is_followed)
        self._low = arrays.series.column(np.float64, np.inf, shape=(2,))
        self._high = arrays.series.column(np.float64, -np.inf, shape=(2,))
        self.familiar: Mask = np.zeros(0, bool)

    def take_in(self, observed: Observed, *, dependent: bool) -> Mask:
        """Return which rows are of sizes as before, shape (n,); none where data are not `dependent`."""
        record = observed.record
        self.familiar = np.zeros(len(record), bool)
        if not dependent:
            return self.familiar
        followed = self._is_followed.values[record.where] & observed.judged
        ids, columns = record.ids[followed], record.columns[:, followed]
        root = columns[NORM] / np.sqrt(np.maximum(observed.numel[followed], 1.0))
        sizes = np.stack((root, np.maximum(np.abs(columns[MIN]), np.abs(columns[MAX]))))
        low, high = self._low.values[:, ids], self._high.values[:, ids]
        self.familiar[followed] = ((sizes * MARGIN >= low) & (sizes <= high * MARGIN)).all(axis=0)
        self._low.values[:, ids], self._high.values[:, ids] = np.fmin(low, sizes), np.fmax(high, sizes)
        return self.familiar


def _is_followed(series: Series) -> bool:
    return series.is_model_input or (series.quantity == GRADIENT and not series.micro_step)
