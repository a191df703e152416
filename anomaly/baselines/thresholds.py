"""How each kind of series moves while nothing is wrong, before its own history says so."""

from dataclasses import dataclass
from typing import Final

from trainsentry.anomaly.rules.state_reset import SQUARES
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
    """Limits of a kind of series.

    `floor`: the smallest deviation assumed, in natural log units; `young`: added to it, divided by the number of
    samples, for few samples say little about the spread; `ratio`: a jump is at least this many times the usual size, up
    or down, and this many times the sample before it.
    """

    floor: float
    young: float
    ratio: float


DEFAULT: Final = Thresholds(floor=0.15, young=2.5, ratio=2.0)
"""Gradients, activations and updates: heavy-tailed, and far from stationary while the model warms up."""

WEIGHTS: Final = Thresholds(floor=0.05, young=0.5, ratio=1.6)
"""Weights move by a few percent between two looks."""

STATE: Final = Thresholds(floor=0.3, young=2.5, ratio=10.0)
"""Moments average over many gradients: one that is ten times what it was has met a gradient beyond all before it."""

SQUARED_STATE: Final = Thresholds(floor=0.6, young=5.0, ratio=100.0)
"""The same of a square, in log units twice as much. While such an average is young, one element that begins to learn
raises the largest: in healthy runs of a GPT with 5 million parameters 13-fold and 24-fold from one step to the next."""

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
"""Smallest deviation assumed of mean ÷ root mean square, which lies between -1 and 1."""

ZEROS_FLOOR: Final = 0.3
"""Smallest deviation assumed of the log-odds of zeros: a factor of 1.35 in the odds."""

MEAN_JUMP: Final = 0.8
ZEROS_JUMP: Final = 2.5
"""Least jumps of the two: most of the range, and a factor of 12 in the odds (none to a third, half to all)."""

KEEP_THEIR_SIGN: Final = frozenset({PARAMETER, ACTIVATION_INPUT, ACTIVATION_OUTPUT})
"""Quantities whose mean is followed; that of a gradient turns its sign whenever a weight is past its best value."""


LEAST_FALL: Final = 2.3
"""Least fall of what the backward pass makes that is odd, in log units: a factor of ten, beyond what the loss has
fallen. A layer whose work is done is given less and less."""

FALLS: Final = frozenset({GRADIENT, GRADIENT_UNREDUCED, ACTIVATION_GRAD_INPUT, ACTIVATION_GRAD_OUTPUT, UPDATE})

LEAST_FALL_OF_LOSS: Final = 1.1
"""The same for the loss: a factor of three from one sample to the next. A slow fall is what training is for."""


def least_fall_of(series: Series) -> float:
    """Return what the size of a series must fall by to be odd, in log units; 0 for no more than a jump.

    >>> least_fall_of(Series("fc.weight", PARAMETER))
    0.0
    """
    if series.scalar:
        return LEAST_FALL_OF_LOSS if series.name == "loss" else 0.0
    return LEAST_FALL if series.quantity in FALLS else 0.0


def sensitivity_of(series: Series) -> Thresholds:
    """Return how a series is to be judged."""
    if series.scalar:
        return SCALAR
    if series.is_state:
        return SQUARED_STATE if series.quantity in SQUARED else STATE
    return WEIGHTS if series.quantity == PARAMETER else DEFAULT
