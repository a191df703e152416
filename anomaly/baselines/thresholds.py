"""Prior thresholds of each group of series, before the run's own history replaces them."""

from dataclasses import dataclass
from typing import Final

from trainsentry.anomaly.series_facts import SQUARES
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    GRADIENT,
    GRADIENT_UNREDUCED,
    PARAMETER,
    UPDATE,
    Series,
)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds of a series.

    `floor`: the least deviation assumed, in natural log units. `young`: added to the deviation, divided by the number
    of samples, because few samples tell little about the spread. `ratio`: least factor of a jump, up or down, from the
    usual size and from the sample before.
    """

    floor: float
    young: float
    ratio: float


DEFAULT: Final = Thresholds(floor=0.15, young=2.5, ratio=2.0)
"""Gradients, activations and updates: heavy-tailed, and far from stationary while the model warms up."""

WEIGHTS: Final = Thresholds(floor=0.05, young=0.5, ratio=1.6)
"""Weights move by a few percent between two looks."""

STATE: Final = Thresholds(floor=0.3, young=2.5, ratio=10.0)
"""Moments average over many gradients: a tenfold jump takes a gradient beyond all before it."""

SQUARED_STATE: Final = Thresholds(floor=0.6, young=5.0, ratio=100.0)
"""The same for a square, whose log units count twice. While such an average is young, one element that begins to learn
raises its maximum: in healthy runs of a GPT with 5 million parameters 13-fold and 24-fold from one step to the next."""

SQUARED: Final = SQUARES | {
    "max_exp_avg_sq",  # AMSGrad
    "sum",  # Adagrad
    "accum",  # Adagrad of MindSpore
    "acc_delta",  # Adadelta
    "ms",  # RMSProp of MindSpore
    "mean_square",
    "variance",  # Adafactor
    "row_var",
    "col_var",
    "exp_avg_sq_row",
    "exp_avg_sq_col",
}
"""State that averages or sums squares."""

SCALAR: Final = Thresholds(floor=0.06, young=0.5, ratio=1.5)
"""A loss moves little from step to step, and half as much again is much."""

MEAN_FLOOR: Final = 0.05
"""Least deviation assumed of mean ÷ root mean square, which lies between -1 and 1."""

ZEROS_FLOOR: Final = 0.3
"""Least deviation assumed of the log-odds of zeros: a factor of 1.35 in the odds."""

MEAN_JUMP: Final = 0.8
ZEROS_JUMP: Final = 2.5
"""Least jumps of both: most of the range, and a factor of 12 in the odds (none to a third, half to all)."""

KEEP_THEIR_SIGN: Final = frozenset({PARAMETER, ACTIVATION_INPUT, ACTIVATION_OUTPUT})
"""Quantities whose mean is followed; that of a gradient changes sign whenever a weight passes its best value."""


LEAST_FALL: Final = 2.3
"""Least fall of a backward quantity that is odd, in log units beyond the fall of the loss: a factor of ten. The
gradients of a layer that has converged shrink."""

FALLING: Final = frozenset({GRADIENT, GRADIENT_UNREDUCED, ACTIVATION_GRAD_INPUT, ACTIVATION_GRAD_OUTPUT, UPDATE})

LEAST_FALL_OF_LOSS: Final = 1.1
"""The same for the loss, from one sample to the next: a factor of three. A slow fall is the purpose of training."""


def least_fall_of(series: Series) -> float:
    """Return the least fall of a series' size that is odd, in log units; 0 where any jump is.

    >>> least_fall_of(Series("fc.weight", PARAMETER))
    0.0
    """
    if series.scalar:
        return LEAST_FALL_OF_LOSS if series.name == "loss" else 0.0
    return LEAST_FALL if series.quantity in FALLING else 0.0


def thresholds_of(series: Series) -> Thresholds:
    """Return the thresholds of a series."""
    if series.scalar:
        return SCALAR
    if series.is_state:
        return SQUARED_STATE if series.quantity in SQUARED else STATE
    return WEIGHTS if series.quantity == PARAMETER else DEFAULT
