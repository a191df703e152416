"""Measures the errors of one output of a call against the same output in a better precision."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainsentry.anomaly.accuracy.dtype_limits import SINGLE, Array, DtypeLimits, limits_of, rounded

NOTHING: Final = float(np.finfo(np.float64).eps)
"""The largest magnitude that msprobe takes for a tensor of zeros, where it computes no cosine."""


@dataclass(frozen=True)
class OutputErrors:
    """Errors of an output, as msprobe measures them; `max_absolute` and `rms` have its unit, the others none.

    `cosine` is None for a single element and for tensors of zeros. The shares are of all elements, but for
    `small_wrong` (of the elements below the dtype's `small_value`), `relative_wrong` (of the others) and
    `non_finite_wrong` (of the elements that are NaN or Inf on either side). Relative errors are those of the elements
    that are not small. `one_is_zero`: one side is all zeros, the other is not.
    """

    cosine: float | None
    one_is_zero: bool
    max_absolute: float
    max_relative: float
    mean_relative: float
    rms: float
    balance: float
    within_hundredth: float
    within_thousandth: float
    within_ten_thousandth: float
    different: float
    small_wrong: float
    relative_wrong: float
    non_finite_wrong: float
    max_ulps: float
    mean_ulps: float
    many_ulps: float


def measure(expected: Array, got: Array, dtype: str) -> OutputErrors:
    """Return the errors of `got`, which has the dtype named, against `expected`, which is in a better precision.

    Both are flat and of one length, at least 1. Elements that are the same NaN or Inf on both sides agree. Formulas:
    the manual of msprobe's accuracy check (1.0.3) and `algorithm.py` of 26.2.
    """
    limits = limits_of(dtype) or SINGLE
    as_tested = rounded(expected, dtype)
    finite = np.isfinite(as_tested) & np.isfinite(got)
    agrees = ~finite & ((as_tested == got) | (np.isnan(as_tested) & np.isnan(got)))
    with np.errstate(all="ignore"):
        errors = np.where(agrees, 0.0, np.abs(got - expected))
        errors = np.where(np.isnan(errors), np.inf, errors)
        relative = np.where(errors == 0, 0.0, errors / (np.abs(expected) + NOTHING))
        small = finite & (np.abs(expected) <= limits.small_value)
        normal = finite & ~small
        cosine, one_is_zero = _cosine(np.where(agrees, 0.0, expected), np.where(agrees, 0.0, got))
        sides = np.sign(np.where(finite, got - as_tested, 0.0))
        counted = relative[normal]
        ulps = _ulps(errors, expected, limits)
    return OutputErrors(
        cosine=cosine,
        one_is_zero=one_is_zero,
        max_absolute=float(errors.max()),
        max_relative=float(counted.max(initial=0.0)),
        mean_relative=float(counted.mean()) if counted.size else 0.0,
        rms=float(np.sqrt(np.mean(np.square(errors[normal])))) if counted.size else 0.0,
        balance=float(abs(np.mean(sides))),
        within_hundredth=float(np.mean(relative < 1e-2)),
        within_thousandth=float(np.mean(relative < 1e-3)),
        within_ten_thousandth=float(np.mean(relative < 1e-4)),
        different=float(np.mean(~agrees & (as_tested != got))),
        small_wrong=_share(errors > limits.small_error, small),
        relative_wrong=_share(relative > limits.relative_error, normal),
        non_finite_wrong=_share(~agrees, ~finite),
        max_ulps=float(ulps.max()),
        mean_ulps=float(ulps.mean()),
        many_ulps=float(np.mean(ulps > limits.many_ulps)),
    )


def _cosine(expected: Array, got: Array) -> tuple[float | None, bool]:
    """Return the cosine, and whether exactly one of two tensors is all zeros; scaled, so as not to overflow."""
    if expected.size == 1:
        return None, False
    sizes = [float(np.abs(side).max()) for side in (expected, got)]
    zeros = [size <= NOTHING for size in sizes]
    if any(zeros):
        return None, not all(zeros)
    one, other = expected / sizes[0], got / sizes[1]
    cosine = float(np.dot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other)))
    return float(np.clip(cosine, -1.0, 1.0)), False


def _ulps(errors: Array, expected: Array, limits: DtypeLimits) -> Array:
    """Return errors in units in the last place of the expected value."""
    exponent = np.where(expected == 0, limits.lowest_exponent, np.floor(np.log2(np.abs(expected))))
    exponent = np.where(np.isfinite(exponent), np.maximum(exponent, limits.lowest_exponent), 0.0)
    ulps: Array = errors * np.exp2(limits.mantissa_bits - exponent)
    return ulps


def _share(wrong: NDArray[np.bool_], among: NDArray[np.bool_]) -> float:
    count = int(among.sum())
    return float((wrong & among).sum() / count) if count else 0.0


def share_of_different(expected: NDArray[np.generic], got: NDArray[np.generic]) -> float:
    """Return the share of elements of integers or booleans that differ."""
    return float(np.mean(expected != got)) if expected.size else 0.0
