"""How two tensors point: every way of reading agrees with NumPy, on odd sizes, dtypes and values."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from trainsentry.collectors.alignment import row_of_pair
from trainsentry.collectors.series import MOMENT_DIRECTION, SeriesTable
from trainsentry.collectors.statistics import MEAN, VALUE
from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.rows import pair_rows
from trainsentry.collectors.torch.rows.list_statistics import ListStatistics
from trainsentry.collectors.torch.rows.pair_rows import DevicePairs, rows_of_host_pairs
from trainsentry.collectors.torch.rows.step_rows import StepRows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (0, 1, 15, 17, 1023, 1025, 70_000)


def pairs_of(first, second):
    torch.manual_seed(0)
    found = []
    for n in SIZES:
        a = torch.randn(n)
        found.append((a.to(first), (0.3 * a + torch.randn(n)).to(second)))
    return [*found, (torch.zeros(40, dtype=first), torch.ones(40, dtype=second))]


def assert_rows(pairs, rows, rtol=1e-12):
    for (a, b), row in zip(pairs, np.asarray(rows), strict=True):
        np.testing.assert_allclose(row, row_of_pair(a.double().numpy(), b.double().numpy()), rtol, 1e-9)


@pytest.fixture(params=["kernels", "plain", "float32"])
def on_device(request, monkeypatch):
    """Compare as a device does: by kernels in Triton's interpreter, by plain operations, or without float64."""
    if request.param == "kernels":
        pytest.importorskip("triton", minversion="3.4")
        monkeypatch.setattr(type(CPU), "has_triton", lambda self: True)
    monkeypatch.setattr(CPU, "has_float64", request.param != "float32")
    device = torch.device("cpu")
    return DevicePairs(device, ListStatistics(device)), 1e-4 if request.param == "float32" else 1e-9


@pytest.mark.parametrize("second", DTYPES)
@pytest.mark.parametrize("first", DTYPES)
def test_pairs_in_host_memory_are_compared_exactly(first, second):
    pairs = pairs_of(first, second)
    assert_rows(pairs, rows_of_host_pairs(pairs))


def test_pairs_are_compared_without_a_compiler_too(monkeypatch):
    monkeypatch.setattr(pair_rows, "KINDS", {})
    pairs = pairs_of(torch.bfloat16, torch.float32)
    assert_rows(pairs, rows_of_host_pairs(pairs))


def test_threads_do_not_change_a_row():
    pairs = [(torch.randn(300_001), torch.randn(300_001))]
    together = rows_of_host_pairs(pairs)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert (rows_of_host_pairs(pairs) == together).all()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtypes", [DTYPES[:1] * 2, DTYPES[1:3], (torch.bfloat16, torch.float32)])
def test_a_device_compares_as_the_host_does(on_device, dtypes):
    device, rtol = on_device
    pairs = pairs_of(*dtypes)
    assert_rows(pairs, device.rows_of(pairs), rtol)


def test_views_that_are_not_contiguous_are_compared(on_device):
    device, rtol = on_device
    a, b = torch.randn(33, 20), torch.randn(20, 33)
    pairs = [(a, b.t()), (a[:, ::2], b.t()[:, ::2])]
    assert_rows(pairs, device.rows_of(pairs), rtol)
    assert_rows(pairs, rows_of_host_pairs(pairs))


def test_elements_are_compared_with_those_of_the_same_place_however_both_lie_in_memory(on_device):
    """The gradient of a channels-last weight, and a moment that a checkpoint has brought back in order."""
    device, rtol = on_device
    torch.manual_seed(0)
    a, b = torch.randn(2, 4, 3, 5, 6).unbind()
    last = torch.channels_last
    pairs = [(a.contiguous(memory_format=last), b), (a, b.contiguous(memory_format=last))]
    pairs += [tuple(x.contiguous(memory_format=last) for x in (a, b)), (a, b), (a.transpose(0, 2), b.transpose(0, 2))]
    for pair in pairs:
        assert_rows([pair], device.rows_of([pair]), rtol)
    assert_rows(pairs, device.rows_of(pairs), rtol)


def test_nothing_is_said_of_values_that_are_not_finite(on_device):
    device, _ = on_device
    a = torch.randn(50)
    a[3] = math.nan
    pairs = [(a, torch.randn(50))]
    assert math.isnan(device.rows_of(pairs)[0, VALUE])
    assert math.isnan(rows_of_host_pairs(pairs)[0, VALUE])


def test_a_list_takes_two_launches_however_long_it_is(monkeypatch):
    pytest.importorskip("triton", minversion="3.4")
    monkeypatch.setattr(type(CPU), "has_triton", lambda self: True)
    device = torch.device("cpu")
    compare = DevicePairs(device, ListStatistics(device))
    compare.rows_of([(torch.randn(n), torch.randn(n)) for n in range(1, 40)])
    assert compare.launches == 2


def test_plain_operations_hold_a_bounded_part_of_the_list(monkeypatch):
    monkeypatch.setattr(pair_rows, "PLAIN_BYTES", 1000)
    device = torch.device("cpu")
    pairs = [(torch.randn(n), torch.randn(n)) for n in (100, 300, 7, 90, 200)]
    assert_rows(pairs, DevicePairs(device, ListStatistics(device)).rows_of(pairs), 1e-9)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_step_has_a_row_for_each_pair(on_device):
    rows = StepRows(SeriesTable(), device_rows_on_cpu=on_device)
    pairs = [(torch.randn(5), torch.randn(5)), (nn.Parameter(torch.randn(3)).detach(), torch.randn(3))]
    rows.add_pairs([4, 2], pairs, [None, None])
    pending = rows.take()
    pending.wait()
    ids, _, values = pending.resolve()
    assert ids.tolist() == [4, 2]
    assert_rows(pairs, values, 1e-6)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_moment_is_that_before_the_update(name, tmp_path):
    import trainsentry

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = OPTIMIZERS[name](model.parameters())
    config = {
        "output_dir": str(tmp_path),
        "statistics": ["norm", "alignment"],
        "collect": {"optimizer_state": {"every": 1}, "activations": False},
    }
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for _ in range(3):
            model(torch.randn(12, 6)).square().mean().backward()
            key = "momentum_buffer" if "momentum" in optimizer.defaults else "exp_avg"
            wanted = {
                n: row_of_pair(p.grad.numpy(), optimizer.state[p][key].numpy())
                for n, p in model.named_parameters()
                if optimizer.state
            }
            optimizer.step()
            optimizer.zero_grad()
        found = monitor.metrics(MOMENT_DIRECTION)
    assert {n: pytest.approx(row[VALUE]) for n, row in wanted.items()} == {n: f["alignment"] for n, f in found.items()}
    table = pd.read_csv(next((tmp_path / "rank0").glob("moment_direction_*.csv")))
    assert list(table)[5:7] == ["norm", "alignment"]
    last = table[table["step"] == 2].set_index("name")
    assert last["alignment"].to_dict() == {n: numbers["alignment"] for n, numbers in found.items()}
    assert last["norm"].to_dict() == {n: pytest.approx(row[MEAN]) for n, row in wanted.items()}
