"""Both ways to compute a row agree with the NumPy reference on every dtype and every odd value."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import MEAN, NORM, STATISTICS, content_fingerprints, fingerprints, reference
from trainsentry.collectors.torch.rows import host_statistics
from trainsentry.collectors.torch.rows.device_statistics import device_row
from trainsentry.collectors.torch.rows.host_statistics import host_row
from trainsentry.collectors.torch.rows.local_tensor import stored_values
from trainsentry.collectors.torch.rows.step_rows import StepRows

NAN, INF = math.nan, math.inf


def as_numpy(tensor):
    if tensor.is_complex() or tensor.dtype in {torch.float64, torch.bool} or not tensor.is_floating_point():
        return tensor.numpy()
    return tensor.double().numpy()


def assert_is_reference(row, expected, size):
    for column, name in enumerate(STATISTICS):
        got, want = float(row[column]), expected[name]
        if column == NORM:
            assert got == pytest.approx(want, rel=1e-6, abs=1e-300), name
        elif column == MEAN:
            bound = 1e-6 * expected["norm"] / math.sqrt(max(size, 1))
            assert got == pytest.approx(want, abs=bound, nan_ok=True), name
        else:
            assert got == pytest.approx(want, rel=1e-7, nan_ok=True), name


def check(tensor, eps=0.0):
    expected = reference(as_numpy(tensor), eps)
    assert host_statistics.KINDS, "the compiled kernel is missing"
    assert_is_reference(host_row(tensor, eps), expected, tensor.numel())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_statistics, "KINDS", {})
        assert_is_reference(host_row(tensor, eps), expected, tensor.numel())  # as where no compiler was
    assert_is_reference(device_row(tensor, eps).tolist(), expected, tensor.numel())


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS + FP8)
def test_floats(dtype):
    check(torch.randn(37, 11, generator=torch.Generator().manual_seed(1)).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [[NAN], [INF], [-INF], [NAN, INF, -INF, NAN]])
def test_statistics_are_over_finite_values_and_the_counts_say_so(dtype, bad):
    check(torch.cat([torch.randn(50), torch.tensor(bad), torch.zeros(3)]).to(dtype))


@pytest.mark.parametrize("values", [[NAN, NAN], [INF], [NAN, -INF]])
def test_nothing_finite(values):
    row = reference(values)
    assert math.isnan(row["min"])
    assert row["norm"] == 0.0
    check(torch.tensor(values))


def test_empty():
    row = reference([])
    assert math.isnan(row["mean"])
    assert math.isnan(row["zeros"])
    assert (row["norm"], row["nans"]) == (0.0, 0.0)
    check(torch.empty(0, 3))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_integers_and_bool_count_as_numbers(dtype):
    check(torch.tensor([0, 1, 1, 0, 5]).to(dtype))


def test_complex_counts_by_magnitude():
    check(torch.tensor([3 + 4j, 0j, -1j]))
    check(torch.tensor([complex(NAN, 1), complex(1, INF), 1 + 1j], dtype=torch.complex64))


def test_scalar_and_non_contiguous():
    check(torch.tensor(-2.5))
    check(torch.arange(24.0).view(4, 6).t()[::2])


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (60000.0, torch.float16),
        (1e30, torch.float32),
        (1e-30, torch.float32),
        (1e38, torch.bfloat16),
        (1e300, torch.float64),
    ],
)
def test_the_norm_of_finite_values_does_not_overflow(value, dtype):
    tensor = torch.full((1000,), value, dtype=torch.float64).to(dtype)
    row = host_row(tensor)
    assert row[NORM] == pytest.approx(float(tensor[0]) * math.sqrt(1000), rel=1e-6)
    check(tensor)


def test_bfloat16_norms_are_accurate_on_large_tensors():
    check(torch.randn(300_000, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16))


def test_zeros_within_eps():
    check(torch.tensor([0.0, 1e-9, -1e-9, 1e-3, 1.0]), eps=1e-8)


def test_sparse_gradients_count_the_zeros_that_are_not_stored():
    dense = torch.zeros(10, 4)
    dense[3], dense[7] = 1.5, -2.0
    values, implicit = stored_values(dense.to_sparse(1))
    expected = reference(dense.numpy())
    assert_is_reference(host_row(values, 0.0, implicit), expected, dense.numel())
    assert_is_reference(device_row(values, 0.0, implicit).tolist(), expected, dense.numel())


values = st.lists(
    st.one_of(st.floats(width=32), st.sampled_from([0.0, NAN, INF, 1e-40, -3e-42, 1e-45, 3e38])),
    max_size=40,
)


@given(values=values)
@settings(max_examples=150, deadline=None)
def test_any_float32_values(values):
    check(torch.tensor(np.asarray(values, np.float32)))


class Forbids(TorchDispatchMode):
    """Fails on any operation that waits for a device, or copies from it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), function
        assert "nonzero.default" not in str(function), function
        return function(*args, **(kwargs or {}))


def test_a_device_row_reads_no_value_on_the_host():
    rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
    tensors = [torch.randn(5, 5), torch.tensor([NAN, INF]), torch.ones(3, dtype=torch.int64), torch.empty(0)]
    with Forbids():
        for i, tensor in enumerate(tensors):
            rows.add(i, tensor)
        rows.add_scalar(9, torch.tensor(3.0))
        rows.add_shared(10, tensors[0])
        rows.add_many([11], [tensors[0]], torch.tensor(2.0))
        pending = rows.take()
    assert len(pending.copies) == 1  # one copy a step
    _, _, got = pending.resolve()
    for i, tensor in enumerate(tensors):
        assert_is_reference(got[i], reference(as_numpy(tensor)), tensor.numel())
    assert got[4, 7] == 3.0
    assert got[6, NORM] == pytest.approx(got[0, NORM] / 2)


def test_a_tensor_met_twice_is_read_once_and_anew_after_a_change():
    table = SeriesTable()
    rows = StepRows(table)
    calls = []
    rows.add = lambda series_id, tensor: (calls.append(series_id), StepRows.add(rows, series_id, tensor))[1]
    tensor = torch.ones(4)
    rows.add_shared(0, tensor)
    rows.add_shared(1, tensor)
    tensor.mul_(3)
    rows.add_shared(2, tensor)
    assert calls == [0, 2]
    _, _, values = rows.take().resolve()
    assert values[:, NORM].tolist() == [2.0, 2.0, 6.0]


def test_meta_tensors_give_no_row():
    rows = StepRows(SeriesTable())
    rows.add(0, torch.empty(3, device="meta"))
    assert len(rows) == 0


def test_rows_outgrow_their_first_buffer():
    rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
    for i in range(2500):
        rows.add(i, torch.full((2,), float(i)))
    assert rows.take().resolve()[2][:, 1].tolist() == [float(i) for i in range(2500)]


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("part", [slice(None), slice(3, 7)], ids=["whole", "view"])
def test_a_tensor_whose_memory_was_released_has_no_row(part, on_device):
    """Sharded training keeps the tensor; to read where it was would end the process, a view's place from 0 on too."""
    rows = StepRows(SeriesTable(), device_rows_on_cpu=on_device)
    rows.add(9, torch.ones(1))
    tensors = [torch.ones(2), torch.ones(8)[part]]
    for ids in ([9, 0, 1, 2, 3], [2]):  # the list is known in the second step
        rows.add(0, tensors[1])
        rows.add_shared(1, tensors[1])
        rows.add_many([2, 3], tensors)
        assert rows.take().resolve()[0].tolist() == ids
        tensors[1].untyped_storage().resize_(0)


def test_batches_of_few_tokens_are_told_apart_by_more_than_the_sum_of_their_bits():
    """XOR and sum of 256 tokens of 64 kinds take some 30,000 values, so that many of 2,000 batches share them."""
    torch.manual_seed(0)
    rows = np.array([host_row(torch.randint(0, 64, (16, 16)), 0.0) for _ in range(2000)])
    assert len(set(fingerprints(rows).tolist())) < 1990
    assert len(set(content_fingerprints(rows).tolist())) == 2000


def test_the_same_content_has_the_same_fingerprint_wherever_it_lies():
    torch.manual_seed(0)
    for content in (torch.randint(0, 2, (333,)), torch.randn(333), (torch.rand(333) < 0.5).float()):
        aside = torch.zeros(334, dtype=content.dtype)[1:].copy_(content)
        rows = np.array([host_row(content, 0.0), host_row(aside, 0.0)])
        assert len(set(content_fingerprints(rows).tolist())) == 1
