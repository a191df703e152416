"""Sizes of inputs and gradients that a policy's own data have made before, and that are nothing new."""

from typing import Final

import numpy as np

from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Mask, SeriesArrays
from trainsentry.collectors.series import GRADIENT, Series
from trainsentry.collectors.statistics import MAX, MIN, NORM

MARGIN: Final = 1.5
"""Factor beyond the sizes of before within which a spike is still familiar: extremes of so few episodes grow. A
critic's gradients came again at 0.5 to 1.1 times the largest of before, which a settled policy's are a hundredth of."""

BLOCK: Final = 16
"""Records after which sizes begin to count, at the latest after twice as many: another level is told a few records
after it began."""


class SeenSizes:
    """The least and the largest size of each input and gradient of a parameter, while data were dependent.

    A policy that has settled observes alike for thousands of updates, and then meets again what it met before.
    `familiar` says which rows of the last record are of such sizes, shape (n,), and `within` which do not go beyond
    them.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_followed = arrays.series.column(bool, of=_is_followed)
        # By age: what counts, and the blocks before. The negative of the least, and the largest, of two sizes.
        self._most = arrays.series.column(np.float64, -np.inf, shape=(3, 4))
        self._records = 0
        self.familiar: Mask = np.zeros(0, bool)
        self.within: Mask = np.zeros(0, bool)

    def take_in(self, observed: Observed, *, dependent: bool) -> None:
        """Take in a record; nothing is familiar where data are not `dependent`."""
        record = observed.record
        self.familiar, self.within = np.zeros(len(record), bool), np.zeros(len(record), bool)
        if not dependent:
            return
        followed = self._is_followed.values[record.where] & observed.judged
        ids, columns = record.ids[followed], record.columns[:, followed]
        root = columns[NORM] / np.sqrt(np.maximum(observed.numel[followed], 1.0))
        with np.errstate(divide="ignore"):
            sizes = np.log((root, np.maximum(np.abs(columns[MIN]), np.abs(columns[MAX]))))
        both = np.concatenate((-sizes, sizes))
        most, known = self._most.values, np.isfinite(sizes).all(axis=0)
        self.familiar[followed] = (both <= most[0][:, ids] + np.log(MARGIN)).all(axis=0)
        self.within[followed] = (both <= most[0][:, ids]).all(axis=0)
        most[2][:, ids[known]] = np.fmax(most[2][:, ids[known]], both[:, known])
        self._records += 1
        if self._records % BLOCK == 0:
            most[0] = np.maximum(most[0], most[1])
            most[1], most[2] = most[2], -np.inf

    def reject(self) -> None:
        """Forget the newest records: something was wrong in the last one."""
        self._most.values[1:] = -np.inf

    def saved(self, size: int) -> dict[str, list[float]]:
        """Return the sizes of the first `size` series that have any, by their positions."""
        most = self._most.values[0][:, :size]
        return {str(i): most[:, i].tolist() for i in np.isfinite(most).all(axis=0).nonzero()[0].tolist()}

    def adopt(self, series_id: int, saved: dict[str, list[float]], position: int) -> None:
        """Restore a series from `position` of the saved ones."""
        if str(position) in saved:
            self._most.values[0][:, series_id] = saved[str(position)]


def _is_followed(series: Series) -> bool:
    return series.is_model_input or (series.quantity == GRADIENT and not series.micro_step)
