"""Properties of series that decide how detectors treat them, as arrays indexed by series id."""

from typing import Final

from trainsentry.anomaly.series_arrays import Mask, SeriesArrays
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    ACTIVATION_QUANTITIES,
    BUFFER,
    COMMUNICATION_QUANTITIES,
    GRADIENT,
    GRADIENT_UNREDUCED,
    NOT_JUDGED,
    STEP_COUNTER,
    Series,
)

WATCHED_SCALARS: Final = frozenset({"loss", "grad_norm"})
"""Logged scalars that are judged by their size."""

BACKWARD: Final = frozenset({GRADIENT, GRADIENT_UNREDUCED, ACTIVATION_GRAD_INPUT, ACTIVATION_GRAD_OUTPUT, "grad_norm"})
"""Quantities that the backward pass computes, and that overflow when the loss scale is too large."""

BATCH_COUNTER: Final = "num_batches_tracked"
"""The buffer in which batch norm counts its batches."""

SQUARES: Final = frozenset({"exp_avg_sq", "moment2", "moments2", "square_avg", "v"})
"""State that averages squares: v' = β·v + (1 − β)·g² ≥ β·v (Kingma and Ba, "Adam", 2015; RMSprop)."""


class SeriesFacts:
    """Masks over the series of a table, shape (series,); they grow with `arrays`.

    `scalar`: a logged number. `activation`: a tensor that enters or leaves a module, or its gradient.
    `judged`: may have anomalies of its own. A module's input only tells whether the module is to blame, so inputs are
    not judged, except the root's: they are the data. `watched`: its size means trouble. A logged learning rate or
    temperature may jump by design, and many loops log NaN for a value that they do not have.
    `output`: a tensor that leaves a module. `backward`: computed by the backward pass, where a loss scaler tries how
    far it can go.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self.table = arrays.table
        self._scalar = arrays.series.column(bool, of=lambda s: s.scalar)
        self._activation = arrays.series.column(bool, of=lambda s: s.quantity in ACTIVATION_QUANTITIES)
        self._may_mask = arrays.series.column(
            bool, of=lambda s: s.quantity in ACTIVATION_QUANTITIES or s.quantity == BUFFER
        )
        self._judged = arrays.series.column(bool, of=_is_judged)
        self._watched = arrays.series.column(bool, of=_is_watched)
        self._output = arrays.series.column(bool, of=lambda s: s.quantity == ACTIVATION_OUTPUT)
        self._backward = arrays.series.column(bool, of=lambda s: s.quantity in BACKWARD)

    @property
    def scalar(self) -> Mask:
        """Logged numbers."""
        return self._scalar.values

    @property
    def activation(self) -> Mask:
        """Tensors that enter or leave a module, and their gradients."""
        return self._activation.values

    @property
    def may_mask(self) -> Mask:
        """Tensors that may be masks, which hold −Inf or the smallest number of their dtype by design."""
        return self._may_mask.values

    @property
    def judged(self) -> Mask:
        """Series that may have anomalies of their own."""
        return self._judged.values

    @property
    def watched(self) -> Mask:
        """Series whose size means trouble."""
        return self._watched.values

    @property
    def output(self) -> Mask:
        """Tensors that leave a module: they are there where activations are sampled, unlike the model's inputs."""
        return self._output.values

    @property
    def backward(self) -> Mask:
        """Series that the backward pass computes."""
        return self._backward.values


def _is_watched(series: Series) -> bool:
    if series.quantity in COMMUNICATION_QUANTITIES:
        return False  # buffers have padding that nobody writes; the ranks' inputs and outputs are compared instead
    if series.quantity == BUFFER and series.name.endswith(BATCH_COUNTER):
        return False
    if series.is_state and series.quantity == STEP_COUNTER:
        return False  # a run that is rolled back sets it back; the rule on lost optimizer state follows it
    return not series.scalar or series.name in WATCHED_SCALARS


def _is_judged(series: Series) -> bool:
    if series.quantity in COMMUNICATION_QUANTITIES:
        return False
    if series.quantity == ACTIVATION_INPUT:
        return series.module == ""
    return series.quantity != ACTIVATION_GRAD_OUTPUT and series.quantity not in NOT_JUDGED
