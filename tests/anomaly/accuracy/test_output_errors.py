"""Errors of an output are measured as msprobe's manual defines them, and agreeing NaN and Inf are no error."""

import numpy as np
import pytest

from trainsentry.anomaly.accuracy.dtype_limits import rounded
from trainsentry.anomaly.accuracy.output_errors import measure


def array(*values):
    return np.array(values, np.float64)


def test_measures_equal_a_computation_by_hand():
    errors = measure(array(1.0, -2.0, 4.0, 1e-9), array(1.0, -2.02, 4.002, 1e-8), "torch.float32")
    assert errors.max_absolute == pytest.approx(0.02)
    assert errors.max_relative == pytest.approx(0.01)
    assert errors.mean_relative == pytest.approx((0.01 + 0.0005) / 3)
    assert errors.rms == pytest.approx(np.sqrt((0.02**2 + 0.002**2) / 3))
    assert (errors.within_hundredth, errors.within_thousandth, errors.within_ten_thousandth) == (0.5, 0.5, 0.25)
    assert (errors.small_wrong, errors.relative_wrong) == (1.0, pytest.approx(2 / 3))
    assert errors.balance == pytest.approx(1 / 4)
    assert errors.different == 0.75
    assert errors.cosine == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("dtype", "unit"), [("torch.float32", 2**-23), ("torch.float16", 2**-10), ("torch.bfloat16", 2**-7)]
)
def test_one_unit_in_the_last_place_is_one_ulp(dtype, unit):
    errors = measure(array(1.5, 3.0, 0.0), array(1.5 + unit, 3.0, 0.0), dtype)
    assert (errors.max_ulps, errors.mean_ulps) == (1.0, pytest.approx(1 / 3))


def test_the_same_nan_and_inf_on_both_sides_agree_and_others_are_wrong():
    same = array(np.nan, np.inf, -np.inf, 1.0)
    agreeing = measure(same, same, "torch.float32")
    assert (agreeing.max_absolute, agreeing.non_finite_wrong, agreeing.different) == (0.0, 0.0, 0.0)
    assert agreeing.cosine == pytest.approx(1.0)
    wrong = measure(same, array(np.nan, -np.inf, 0.0, np.nan), "torch.float32")
    assert (wrong.non_finite_wrong, wrong.max_absolute) == (0.75, np.inf)


def test_a_result_beyond_the_range_of_its_dtype_may_be_inf():
    assert measure(array(1e5, 1.0), array(np.inf, 1.0), "torch.float16").non_finite_wrong == 0.0
    assert measure(array(6e4, 1.0), array(np.inf, 1.0), "torch.float16").non_finite_wrong == 1.0


def test_rounding_to_bfloat16_is_torchs():
    torch = pytest.importorskip("torch")
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double() * 10
    expected = values.float().bfloat16().double().numpy()
    assert np.array_equal(rounded(values.numpy(), "torch.bfloat16"), expected)


def test_zeros_and_single_elements_have_no_cosine():
    nothing, one = np.zeros(3), array(1.0)
    assert (measure(nothing, nothing, "torch.float32").cosine, measure(one, one, "torch.float32").cosine) == (
        None,
        None,
    )
    assert measure(nothing, array(0.0, 1.0, 0.0), "torch.float32").one_is_zero
