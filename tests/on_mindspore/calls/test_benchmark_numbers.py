"""What free_benchmark changes on MindSpore, and how it tells two results apart."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from trainsentry.collectors.calls.free_benchmark import ResultDifference
from trainsentry.collectors.mindspore.calls.free_benchmark import comparison
from trainsentry.collectors.mindspore.calls.free_benchmark.perturbations import perturbed

NOISY = [ms.bfloat16, ms.float16, ms.float32, ms.float64]
LARGEST = {
    ms.bfloat16: float.fromhex("0x1.fep127"),
    ms.float16: 65504.0,
    ms.float32: np.finfo(np.float32).max,
    ms.float64: np.finfo(np.float64).max,
}


@pytest.mark.parametrize("dtype", NOISY)
@pytest.mark.parametrize("mode", ["add_noise", "bit_noise"])
def test_noise_changes_every_number_that_is_large_enough_and_makes_none_infinite(mode, dtype):
    values = [0.3, -3.0, 100.0, -12345.0, LARGEST[dtype], -LARGEST[dtype], 0.0, np.nan, np.inf]
    x = Tensor(np.array(values, np.float64)).astype(dtype)
    [changed], _ = perturbed(mode, (x,), {})
    assert changed.dtype == dtype
    before, after = (t.astype(ms.float64).asnumpy() for t in (x, changed))
    assert (before[:6] != after[:6]).all()
    assert np.isfinite(after[:7]).all()
    assert np.allclose(before[:4], after[:4], rtol=0.02)
    assert (after[6], np.isnan(after[7]), after[8]) == (0.0, True, np.inf)
    assert perturbed(mode, (Tensor(np.zeros(3)).astype(dtype),), {}) is None


def test_the_ends_are_exchanged():
    [changed], _ = perturbed("change_value", (Tensor(np.arange(4).astype(np.float32)),), {})
    assert changed.asnumpy().tolist() == [3.0, 1.0, 2.0, 0.0]
    assert perturbed("change_value", (Tensor(np.ones(4, np.float32)),), {}) is None


A = np.linspace(1, 2, 100).astype(np.float32)


@pytest.mark.parametrize("place", [0, 50, 99])
@pytest.mark.parametrize(
    ("value", "found"),
    [(100.0, "ratio"), (-1.5, "symbol_flipping"), (np.nan, "nan"), (np.inf, "ratio"), (None, "equal")],
)
def test_every_element_counts(monkeypatch, place, value, found):
    monkeypatch.setattr(comparison, "CHUNK", 16)
    other = A.copy()
    if value is not None:
        other[place] = value
    for one, two in ((A, other), (other, A)):
        seen = comparison.difference("add_noise", "forward", Tensor(one), Tensor(two))
        assert seen.word == (found if found in {"symbol_flipping", "nan"} else "")
        assert (seen.ratio > 1.0002) == (found != "equal")
    same = Tensor(np.array([np.nan, np.inf, -np.inf, 1.0], np.float32))
    assert comparison.difference("no_change", "forward", same, same * 1) == ResultDifference(1.0)


def test_a_device_is_held_against_the_cpu_by_size_and_by_balance():
    x = np.linspace(1, 100, 50).astype(np.float32)
    assert comparison.agrees_with_cpu(Tensor(x), Tensor(x * np.float32(1 + 2**-16)))[0]
    assert not comparison.agrees_with_cpu(Tensor(x), Tensor(x * np.float32(1 + 2**-13)))[0]
    half = x.astype(np.float16)
    one_way = half.astype(np.float32) * (1 + 2**-12)
    assert not comparison.agrees_with_cpu(Tensor(half), Tensor(one_way.astype(np.float32)))[0]
