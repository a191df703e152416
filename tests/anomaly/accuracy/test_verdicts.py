"""Each documented rule passes at its limit and fails beyond it."""

import numpy as np
import pytest

from trainsentry.anomaly.accuracy.output_errors import measure
from trainsentry.anomaly.accuracy.pass_rules import judge_mindspore, judge_run_ut
from trainsentry.anomaly.accuracy.standards import JudgedOutput, judge_standard
from trainsentry.anomaly.accuracy.verdict import worst

SINGLE = "torch.float32"


def values(count=1000, seed=0):
    return np.random.default_rng(seed).uniform(1, 2, count)


def run_ut(expected, got, dtype=SINGLE):
    return judge_run_ut(measure(expected, got, dtype), dtype).status


def with_errors(share, relative, scale=10.0):
    """Return 1000 values, and the same with a relative error in a share of them."""
    expected = values() * scale
    got = expected.copy()
    got[: round(share * 1000)] *= 1 + relative
    return expected, got


def test_run_ut_passes_small_absolute_errors_whatever_the_shares():
    expected = values() * 1e-3
    assert run_ut(expected, expected * 1.2) == "pass"


def test_run_ut_judges_float32_by_the_thousandth_and_then_the_ten_thousandth():
    assert run_ut(*with_errors(0.002, 2e-3)) == "error"
    assert run_ut(*with_errors(0.002, 5e-4)) == "warning"
    assert run_ut(*with_errors(0.5, 5e-5)) == "pass"


@pytest.mark.parametrize("dtype", ["torch.float16", "torch.bfloat16"])
def test_run_ut_judges_half_types_by_the_hundredth_and_then_the_thousandth(dtype):
    assert run_ut(*with_errors(0.02, 2e-2), dtype) == "error"
    assert run_ut(*with_errors(0.02, 5e-3), dtype) == "warning"
    assert run_ut(*with_errors(0.02, 5e-4), dtype) == "pass"


def test_a_low_cosine_is_an_error_before_all_else():
    expected = values() * 1e-6
    verdict = judge_run_ut(measure(expected, -expected, SINGLE), SINGLE)
    assert (verdict.status, "cosine" in verdict.reason) == ("error", True)
    assert run_ut(np.zeros(4), np.ones(4) * 1e-5) == "error"


def test_the_mindspore_rule_asks_for_an_absolute_error_below_its_limit():
    expected = values()
    assert judge_mindspore(measure(expected, expected + 0.9e-4, SINGLE)).status == "pass"
    assert judge_mindspore(measure(expected, expected + 1.1e-4, SINGLE)).status == "error"


def standard(operation, got, *, expected=None, dtype=SINGLE, backward=False, benchmark=None, adds=False):
    expected = values() if expected is None else expected
    output = JudgedOutput(operation, backward, dtype, expected, got, adds, benchmark)
    return judge_standard(output, measure(expected, got, dtype))


@pytest.mark.parametrize(
    ("operation", "rule", "good", "bad"),
    [
        ("relu", "binary", 0.0, 2**-22),
        ("__add__", "absolute threshold", 2**-21, 2**-10),
        ("linear", "ulp", 2**-19, 2**-9),
        ("conv2d", "thousandth", 2**-11, 2**-9),
        ("gelu", "benchmark", 2**-15, 2**-12),
    ],
)
def test_each_standard_passes_below_its_limit_and_fails_above_it(operation, rule, good, bad):
    exact = values().astype(np.float32).astype(np.float64)
    passed = standard(operation, exact * (1 + good), expected=exact)
    failed = standard(operation, exact * (1 + bad), expected=exact)
    assert (passed.status, passed.rule) == ("pass", rule)
    assert (failed.status, failed.rule) == ("error", rule)
    assert failed.excess > 1


@pytest.mark.parametrize(("operation", "status"), [("gelu", "error"), ("exp", "pass"), ("embedding", "pass")])
def test_the_benchmark_asks_more_of_calls_of_a_higher_level(operation, status):
    expected = values() / 2
    assert standard(operation, expected * (1 + 1.3 * 2**-14), expected=expected).status == status


def test_an_error_that_moved_inputs_explain_is_none_of_the_devices():
    expected = values() - values()[::-1] + 1e-7  # sums that cancel
    error = 1e-4
    moved = [expected + error, expected - error]
    assert standard("gelu", expected + 1.5 * error, expected=expected).status == "error"
    assert standard("gelu", expected + 1.5 * error, expected=expected, benchmark=lambda: moved).status == "pass"
    assert standard("gelu", expected + 1e-2, expected=expected, benchmark=lambda: moved).status == "error"


def test_sums_of_a_backward_pass_are_not_judged_by_a_list_of_single_roundings():
    got = values() * (1 + 2**-19)
    assert standard("__add__", got).status == "error"
    assert standard("__add__", got, backward=True, adds=True).rule == "benchmark"


def test_a_wrong_nan_fails_whatever_the_benchmark_says():
    got = values()
    got[3] = np.nan
    assert standard("gelu", got, benchmark=lambda: [values() * 2]).excess == np.inf


def test_a_call_is_as_bad_as_its_worst_output():
    assert worst(["pass", "error", "warning"]) == "error"
    assert (worst(["SKIP", "pass"]), worst(["SKIP"]), worst([])) == ("pass", "SKIP", " ")


@pytest.mark.parametrize(("dtype", "status"), [(SINGLE, "error"), ("torch.complex64", "pass")])
def test_an_absolute_value_is_exact_but_for_complex_numbers_which_need_a_root(dtype, status):
    expected = values()
    got = expected * (1 + 2.0**-24)
    output = JudgedOutput("abs", False, dtype, expected, got, False, lambda: [expected * (1 + 1e-7)])
    assert judge_standard(output, measure(expected, got, dtype)).status == status
