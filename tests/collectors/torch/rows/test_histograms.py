"""Every way to read a tensor counts its values as the NumPy reference does."""

import numpy as np
import pytest
import torch

from trainsentry.collectors.histogram import MIDDLE, SLOTS, counts_of
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.rows import device_rows, host_statistics, step_rows
from trainsentry.collectors.torch.rows.step_rows import StepRows

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def odd_values(n, dtype, seed=0):
    """Return values of every magnitude, with zeros of both signs, subnormals, NaN and Inf."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=drawn, dtype=torch.float64) * 10.0 ** torch.randint(-45, 40, (n,), generator=drawn)
    if n >= 8:
        x[:8] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 3.4e38, -1.0])
    return x.to(dtype)


def reference_of(tensor, divisor=1.0):
    counts = counts_of(tensor.double().numpy(), 1.0 / divisor)
    return {int(slot) - MIDDLE: int(counts[slot]) for slot in np.flatnonzero(counts[: SLOTS - 1])}


def found(rows):
    pending = rows.take()
    pending.wait()
    ids, _, _ = pending.resolve()
    histograms = pending.find_histograms()
    numbers = [dict(zip(*map(np.ndarray.tolist, histograms.row(i)), strict=True)) for i in range(len(histograms))]
    return dict(zip(ids.tolist(), numbers, strict=True))


@pytest.fixture(params=["host kernel", "NumPy", "Triton's interpreter", "plain operations"])
def new_rows(request, monkeypatch):
    """Rows by each of the four ways to read a tensor."""
    if request.param == "NumPy":
        monkeypatch.setattr(host_statistics, "KINDS", {})
    if request.param == "Triton's interpreter":
        pytest.importorskip("triton", minversion="3.4")
        monkeypatch.setattr(type(CPU), "has_triton", lambda self: True)
    on_device = request.param in {"Triton's interpreter", "plain operations"}
    return lambda: StepRows(SeriesTable(), histograms=True, device_rows_on_cpu=on_device)


@pytest.mark.parametrize("divided", [False, True])
def test_the_histograms_of_a_list_are_those_of_the_reference(new_rows, divided):
    tensors = [
        odd_values(n, dtype, n) for n, dtype in zip((1, 8, 300, 5000, 40_000), [*FLOATS, torch.float32], strict=True)
    ]
    tensors += [torch.zeros(0), torch.ones(3, 4).t(), torch.arange(5)]
    rows = new_rows()
    divisor = torch.tensor(1024.0) if divided else None
    rows.add_many(range(len(tensors)), tensors, divisor)
    expected = [reference_of(x, 1024.0 if divided else 1.0) for x in tensors]
    assert found(rows) == dict(enumerate(expected))


def test_a_tensor_alone_a_sparse_one_and_one_that_is_met_twice_are_counted(new_rows):
    dense, shared = odd_values(700, torch.float32), odd_values(90, torch.bfloat16, 1)
    sparse = torch.eye(5).to_sparse()
    rows = new_rows()
    rows.add(0, dense)
    rows.add(1, sparse)
    rows.add_shared(2, shared)
    rows.add_shared(3, shared)
    rows.add_scalar(4, 2.5)
    expected = {0: reference_of(dense), 1: {0: 20, 177: 5}, 2: reference_of(shared), 3: reference_of(shared), 4: {}}
    assert found(rows) == expected


def test_a_tensor_with_a_negative_bit_is_counted_as_what_it_stands_for(new_rows):
    """As the imaginary part of a conjugate."""
    rows, values = new_rows(), odd_values(50, torch.float32)
    x = torch.complex(torch.zeros(50), values).conj().imag
    assert x.is_neg()
    rows.add(0, x)
    rows.add_many([1], [x])
    assert found(rows) == dict.fromkeys((0, 1), reference_of(-values))


def test_a_step_does_not_see_the_counts_of_the_step_before(new_rows):
    rows = new_rows()
    for value in (1.0, -2.0):
        rows.add_many([0, 1], [torch.full((300,), value), torch.full((7,), 3 * value)])
        counted = found(rows)
    assert counted == {0: {-181: 300}, 1: {-187: 7}}


def test_a_large_tensor_is_counted_by_all_threads_together():
    x = odd_values(1_000_003, torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        rows = StepRows(SeriesTable(), histograms=True)
        rows.add(0, x)
        assert found(rows)[0] == reference_of(x)
    finally:
        torch.set_num_threads(before)


def test_rows_that_outgrow_their_buffers_keep_their_counts(new_rows, monkeypatch):
    monkeypatch.setattr(device_rows, "FIRST_ROWS", 4)
    rows = new_rows()
    tensors = [torch.full((3,), float(i + 1)) for i in range(20 if rows._device_rows_on_cpu else 600)]
    for i, x in enumerate(tensors):
        rows.add(i, x)
    assert found(rows) == {i: reference_of(x) for i, x in enumerate(tensors)}


def test_kernels_that_fail_half_way_leave_no_count_behind(monkeypatch):
    pytest.importorskip("triton", minversion="3.4")
    monkeypatch.setattr(type(CPU), "has_triton", lambda self: True)
    rows = StepRows(SeriesTable(), histograms=True, device_rows_on_cpu=True)
    launch = device_rows.FusedRows._launch

    def fail_at_the_second(self, *args, **kwargs):
        if self.launches:
            raise RuntimeError("the compiler gave up")
        launch(self, *args, **kwargs)

    monkeypatch.setattr(device_rows.FusedRows, "_launch", fail_at_the_second)
    tensors = [torch.ones(40), torch.ones(50, dtype=torch.bfloat16)]
    rows.add_many([0, 1], tensors)
    assert found(rows) == {0: {177: 40}, 1: {177: 50}}


def test_without_histograms_nothing_is_counted(monkeypatch):
    rows = StepRows(SeriesTable())
    monkeypatch.setattr(step_rows, "host_counts", None)
    rows.add_many([0, 1], [torch.ones(5), torch.ones(2, 2).t()])
    pending = rows.take()
    assert pending.find_histograms() is None
