"""What the detectors need to know of each series, as arrays indexed by series id."""

from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_QUANTITIES,
    COMMUNICATION_QUANTITIES,
    GRADIENT,
    GRADIENT_UNREDUCED,
    STEP_COUNTER,
    Series,
    SeriesTable,
)

WATCHED_SCALARS: Final = frozenset({"loss", "grad_norm"})
"""Logged scalars that are judged by their size."""

BACKWARD: Final = frozenset({GRADIENT, GRADIENT_UNREDUCED, ACTIVATION_GRAD_INPUT, ACTIVATION_GRAD_OUTPUT, "grad_norm"})
"""What the backward pass makes, and what a loss scale that is too large makes overflow."""

Mask = npt.NDArray[np.bool_]


class SeriesFacts:
    """Arrays over the series of a table; they grow with it.

    `judged`: gives anomalies of its own. What enters a module only tells whether the module is to blame, so
    inputs are not judged, except the root's: those are the data. `watched`: whose size means trouble; a logged
    learning rate or temperature may jump by design, and NaN is how many loops log a value they do not have.
    `backward`: made by the backward pass, where a loss scaler tries how far it can go.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self.scalar: Mask = np.zeros(0, bool)
        self.activation: Mask = np.zeros(0, bool)
        self.judged: Mask = np.zeros(0, bool)
        self.watched: Mask = np.zeros(0, bool)
        self.backward: Mask = np.zeros(0, bool)

    def refresh(self) -> None:
        """Take in series that were defined since the last call."""
        new = self.table.series[len(self.scalar) :]
        if new:
            self.scalar = np.append(self.scalar, [s.scalar for s in new])
            self.activation = np.append(self.activation, [s.quantity in ACTIVATION_QUANTITIES for s in new])
            self.judged = np.append(self.judged, [_is_judged(s) for s in new])
            self.backward = np.append(self.backward, [s.quantity in BACKWARD for s in new])
            self.watched = np.append(self.watched, [_is_watched(s) for s in new])


def _is_watched(series: Series) -> bool:
    if series.quantity in COMMUNICATION_QUANTITIES:
        return False  # buffers have padding that nobody writes; what ranks sent and received is compared instead
    if series.is_state and series.quantity == STEP_COUNTER:
        return False  # it goes back with a run that is rolled back; a rule of its own looks at it
    return not series.scalar or series.name in WATCHED_SCALARS


def _is_judged(series: Series) -> bool:
    if series.quantity in COMMUNICATION_QUANTITIES:
        return False
    if series.quantity == ACTIVATION_INPUT:
        return series.module == ""
    return series.quantity != ACTIVATION_GRAD_OUTPUT
