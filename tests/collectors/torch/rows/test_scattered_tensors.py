"""Tensors whose elements do not lie in the order of their axes are read by the kernels all the same, exactly."""

import numpy as np
import pytest
import torch
from counted_launches import counted_launches

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import STATISTICS, reference
from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.rows.kernels.dense_tensors import FLOATS, in_one_piece
from trainsentry.collectors.torch.rows.kernels.fused_rows import FOR_LONG, ROWS_AT_ONCE
from trainsentry.collectors.torch.rows.list_passes import BLOCK, PASS_BLOCKS
from trainsentry.collectors.torch.rows.step_rows import StepRows

pytest.importorskip("triton", minversion="3.4", reason="the kernels need Triton 3.4, which comes with torch 2.8")

SCATTERED = {
    "a batch of tokens without the last ones": torch.arange(72).view(8, 9)[:, :-1],
    "transposed": torch.randn(40, 30).t(),
    "channels last": torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "every other row": torch.randn(64, 12)[::2],
    "expanded": torch.tensor([[1.5], [-2.0]]).expand(2, 50),
    "half precision, permuted": torch.randn(3, 4, 5).half().permute(2, 0, 1),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_it_is_read_by_one_launch_with_the_statistics_of_its_values(name, monkeypatch):
    monkeypatch.setattr(type(CPU), "has_triton", lambda self: True)  # conftest.py has told Triton to interpret
    x = SCATTERED[name]
    rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
    rows.add(0, x)
    [device] = rows._devices.values()
    assert device.fused is not None
    assert device.fused.launches == 1
    pending = rows.take()
    pending.wait()
    want = reference(x.double().numpy())
    row = pending.resolve()[2][0]
    np.testing.assert_allclose(row[: len(STATISTICS)], [want[name] for name in STATISTICS], rtol=1e-12, atol=1e-15)


def test_elements_that_are_neighbours_are_not_copied():
    for name in ("transposed", "channels last"):
        assert in_one_piece(FLOATS, SCATTERED[name], 0).data_ptr() == SCATTERED[name].data_ptr()
    rows = SCATTERED["every other row"]
    assert in_one_piece(FLOATS, rows, rows.numel() - 1) is rows
    assert in_one_piece(FLOATS, rows, rows.numel()).is_contiguous()


def test_a_large_one_with_gaps_is_read_by_parts_which_need_less_memory():
    with counted_launches() as kernels:
        rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
        rows.add(0, torch.ones(BLOCK * PASS_BLOCKS // 8 + 1, 16, dtype=torch.float16)[:, :-1])
        assert kernels.partial == []


def test_many_partial_rows_of_one_tensor_are_combined_in_few_turns(monkeypatch):
    monkeypatch.setattr(type(CPU), "has_triton", lambda self: True)
    x = torch.full((16_384 * (ROWS_AT_ONCE + 1),), 0.5)
    x[-1] = 7.0
    told = []
    rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
    rows.add(0, x)
    [device] = rows._devices.values()
    kernels = device.fused.kernels

    class Told:
        def __getitem__(self, grid):
            def run(*args, **kwargs):
                told.append(kwargs)
                kernels.combine_rows[grid](*args, **kwargs)

            return run

    watched = type("Kernels", (), {"combine_rows": Told()})
    device.fused.kernels = watched()
    pending = rows.take()
    pending.wait()
    assert FOR_LONG.items() <= told[0].items()
    assert pending.resolve()[2][0][:4].tolist() == pytest.approx(
        [0.5, 7.0, x.double().mean().item(), x.double().norm().item()]
    )
