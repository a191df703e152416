"""msprobe's standards by dtype and kind of call, for a single device.

The benchmark comparison divides the device's errors by those of a benchmark, for which msprobe takes a GPU's results.
Here it is the call itself in the better precision, with inputs and results moved by a few roundings of the dtype under
test: an error that this alone explains is none of the device's. It is made only for a call that misses without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainsentry.anomaly.accuracy.dtype_limits import Array, limits_of
from trainsentry.anomaly.accuracy.output_errors import OutputErrors, measure
from trainsentry.anomaly.accuracy.standard_lists import (
    ABSOLUTE,
    BENCHMARK,
    BINARY,
    THOUSANDTH,
    ULP,
    level_of,
    standard_of,
)
from trainsentry.anomaly.accuracy.verdict import ERROR, PASS, Judgement

MEAN_ULPS: Final = 64.0
"""Mean error in units in the last place below which float32 passes (ULP standard)."""

MANY_ULPS: Final = {"torch.float32": 0.05}
"""Share of elements with many wrong units below which a dtype passes; the half types have MANY_ULPS_OF_HALF."""

MANY_ULPS_OF_HALF: Final = 0.001

LEAST_THOUSANDTH: Final = 0.999
"""Share of relative errors below 0.001 that the thousandth standard asks for.

Source of these four: `standard_config.py`, `ulp_compare.py` and `const.py` of msprobe 26.2, the same in 1.x.
"""

_RATIOS: Final = {
    "L0": {"max_relative": 10.0, "mean_relative": 2.0, "rms": 2.0, "small_wrong": 2.0},
    "L1": {"max_relative": 5.0, "mean_relative": 1.5, "rms": 1.5, "small_wrong": 2.0},
    "L2": {"max_relative": 2.0, "mean_relative": 1.2, "rms": 1.2, "small_wrong": 2.0},
}
"""Allowed ratios of the device's error to the benchmark's. Source: `standard_config.py` of msprobe 26.2."""

ROUNDINGS: Final = 4.0
"""Roundings of the tested dtype by which the benchmark moves its inputs: an operation may round its inputs, its
products, its sums and its result."""

EXPLAINED: Final = 4.0
"""Times the benchmark's error up to which an element's error counts as explained: with ROUNDINGS, 16 roundings of
the inputs, the 2⁻²⁰ that the absolute threshold standard allows float32."""

Benchmark = Callable[[], list[Array]]
"""Returns an output several times in the better precision, each time from inputs moved anew."""


@dataclass(frozen=True)
class JudgedOutput:
    """An output of a call; `adds` is as for `standard_of`, `benchmark` is None where it cannot be made."""

    operation: str
    backward: bool
    dtype: str
    expected: Array
    got: Array
    adds: bool = False
    benchmark: Benchmark | None = None


def judge_standard(output: JudgedOutput, errors: OutputErrors) -> Judgement:
    """Judge an output by the standard of its call.

    After a miss of any but the binary one, errors that moved inputs explain are taken off, and the rest judged again.
    A dtype without a better precision, such as float64, has no standard; see `pass_rules.judge_run_ut` for it.
    """
    name = standard_of(output.operation, backward=output.backward, adds=output.adds, dtype=output.dtype)
    if name == BINARY:
        return _limit(BINARY, [(errors.different, 0.0, "share of elements that differ")])
    if errors.non_finite_wrong:
        share = f"share of wrong NaN and Inf is {errors.non_finite_wrong:.3g}, allowed 0"
        return Judgement(ERROR, name, share, float("inf"))
    judge = _JUDGES.get(name)
    missed = judge(errors, output.dtype) if judge is not None else _ratios(output, errors, None)
    if missed.status == PASS or output.benchmark is None:
        return missed
    moved = output.benchmark()
    if not moved:
        return missed
    explained = _explained(moved, output)
    known = np.abs(output.got - output.expected) <= EXPLAINED * explained
    rest = measure(output.expected, np.where(known, output.expected, output.got), output.dtype)
    if judge is not None:
        verdict = judge(rest, output.dtype)
    else:
        verdict = _ratios(output, rest, measure(output.expected, output.expected + explained, output.dtype))
    return verdict if verdict.status == ERROR else Judgement(PASS, name, "moved inputs explain the errors")


def _absolute(errors: OutputErrors, _: str) -> Judgement:
    shares = [
        (errors.relative_wrong, 0.0, "share of relative errors above the dtype's limit"),
        (errors.small_wrong, 0.0, "share of small elements that are wrong"),
    ]
    return _limit(ABSOLUTE, shares)


def _limit(rule: str, found: list[tuple[float, float, str]]) -> Judgement:
    """Judge values that may not exceed their limit."""
    value, limit, what = max(found, key=lambda item: item[0] - item[1])
    if value <= limit:
        return Judgement(PASS, rule, f"{what} is {value:.3g}")
    return Judgement(ERROR, rule, f"{what} is {value:.3g}, allowed {limit:g}", value / (limit or 1e-3))


def _ulp(errors: OutputErrors, dtype: str) -> Judgement:
    most = MANY_ULPS.get(dtype, MANY_ULPS_OF_HALF)
    if (dtype in MANY_ULPS and errors.mean_ulps < MEAN_ULPS) or errors.many_ulps < most:
        return Judgement(PASS, ULP, f"mean {errors.mean_ulps:.3g} ulp, share of wrong elements {errors.many_ulps:.3g}")
    reason = f"mean {errors.mean_ulps:.3g} ulp, share of wrong elements {errors.many_ulps:.3g}, allowed {most:g}"
    return Judgement(ERROR, ULP, reason, errors.many_ulps / most)


def _thousandth(errors: OutputErrors, _: str) -> Judgement:
    share = errors.within_thousandth
    reason = f"share of relative errors below 0.001 is {share:.6g}"
    if share >= LEAST_THOUSANDTH:
        return Judgement(PASS, THOUSANDTH, reason)
    return Judgement(ERROR, THOUSANDTH, f"{reason}, needs {LEAST_THOUSANDTH:g}", (1 - share) / (1 - LEAST_THOUSANDTH))


_JUDGES: Final = {ABSOLUTE: _absolute, ULP: _ulp, THOUSANDTH: _thousandth}
"""Standards that need no benchmark."""


def _explained(moved: list[Array], output: JudgedOutput) -> Array:
    """Return the error at each element that moved inputs and the rounding of the result explain.

    Elements of a sum may cancel to nothing, whatever its terms are moved by (the gradient at a bias before a softmax):
    there the largest element tells the size of the terms.
    """
    limits = limits_of(output.dtype)
    assert limits is not None
    size = np.where(np.isfinite(output.expected), np.abs(output.expected), 0.0)
    with np.errstate(invalid="ignore"):
        spread = np.max([np.nan_to_num(np.abs(one - output.expected), nan=0.0, posinf=0.0) for one in moved], axis=0)
    explained: Array = spread + limits.rounding * size
    return explained + ROUNDINGS * limits.rounding * size.max() if output.adds else explained


def _ratios(output: JudgedOutput, errors: OutputErrors, benchmark: OutputErrors | None) -> Judgement:
    limits = limits_of(output.dtype)
    least = limits.least_error if limits is not None else 2**-14
    level = level_of(output.operation)
    worst_ratio, worst_text = 0.0, ""
    for measured, allowed in _RATIOS[level].items():
        of_benchmark = getattr(benchmark, measured) if benchmark is not None else 0.0
        ratio = getattr(errors, measured) / max(of_benchmark, least)
        if ratio / allowed >= worst_ratio:
            worst_ratio = ratio / allowed
            worst_text = f"{measured} is {ratio:.3g} times the benchmark's, allowed {allowed:g} ({level})"
    return Judgement(
        PASS if worst_ratio <= 1 else ERROR, BENCHMARK, worst_text, worst_ratio if worst_ratio > 1 else 0.0
    )
