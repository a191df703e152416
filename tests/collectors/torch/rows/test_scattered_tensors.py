"""Tensors whose elements do not lie in the order of their axes are read by the kernels all the same, exactly."""

import numpy as np
import pytest
import torch
from counted_launches import counted_launches
from hypothesis import given
from hypothesis import strategies as st
from step_records import resolved

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import STATISTICS, reference
from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.rows import described_tensors
from trainsentry.collectors.torch.rows.kernels.chunks import CHUNK
from trainsentry.collectors.torch.rows.kernels.dense_tensors import FLOATS, in_one_piece, is_dense
from trainsentry.collectors.torch.rows.kernels.fused_rows import ROWS_AT_ONCE
from trainsentry.collectors.torch.rows.list_passes import BLOCK, PASS_BLOCKS
from trainsentry.collectors.torch.rows.step_rows import StepRows

pytest.importorskip("triton", minversion="3.4", reason="the kernels need Triton 3.4, which comes with torch 2.8")

NEIGHBOURS = {
    "transposed": lambda: torch.randn(40, 30).t(),
    "channels last": lambda: torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "half precision, permuted": lambda: torch.randn(3, 4, 5).half().permute(2, 0, 1),
}
GAPS = {
    "a batch of tokens without the last ones": lambda: torch.arange(72).view(8, 9)[:, :-1],
    "every other row": lambda: torch.randn(64, 12)[::2],
    "expanded": lambda: torch.tensor([[1.5], [-2.0]]).expand(2, 50),
}
SCATTERED = NEIGHBOURS | GAPS


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(type(CPU), "has_triton", lambda self: True)  # conftest.py has told Triton to interpret
    torch.manual_seed(0)
    return StepRows(SeriesTable(), device_rows_on_cpu=True)


def fused_of(rows):
    [device] = rows._devices.values()
    assert device.fused is not None
    return device.fused


def assert_row(row, x):
    want = reference(x.double().numpy())
    np.testing.assert_allclose(row[: len(STATISTICS)], [want[name] for name in STATISTICS], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", SCATTERED)
def test_it_is_read_by_one_launch_with_the_statistics_of_its_values(name, rows):
    x = SCATTERED[name]()
    rows.add(0, x)
    assert fused_of(rows).launches == 1
    assert_row(resolved(rows)[0], x)


@pytest.mark.parametrize("name", SCATTERED)
def test_several_are_read_together(name, rows):
    rows.add(0, torch.ones(3))
    tensors = [SCATTERED[name]() for _ in range(3)]
    for i, x in enumerate([*tensors, tensors[0]], 1):
        rows.add_shared(i, x)
    found = resolved(rows)
    assert fused_of(rows).launches == 3  # the first tensor of all, the others, and one to combine
    for i, x in enumerate([*tensors, tensors[0]], 1):
        assert_row(found[i], x)


@pytest.mark.parametrize("name", SCATTERED)
def test_one_that_changes_before_it_is_read_has_the_row_of_its_old_values_or_none(name, rows):
    rows.add(0, torch.ones(3))
    x = SCATTERED[name]()
    old = x.clone()
    rows.add_shared(1, x)
    (x._base if name == "expanded" else x).mul_(3)
    found = resolved(rows)
    assert (1 in found) == (name in GAPS)
    if name in GAPS:
        assert_row(found[1], old)


@given(st.lists(st.integers(0, 3), min_size=0, max_size=4), st.randoms(use_true_random=False), st.integers(0, 3))
def test_compiled_code_and_python_agree_on_what_is_dense(shape, random, dropped):
    x = torch.zeros(shape)
    x = x.permute(random.sample(range(x.dim()), x.dim()))
    if x.dim() and x.shape[0] > dropped:
        x = x[dropped:]
    elements = {x[tuple(i)].data_ptr() for i in np.ndindex(*x.shape)}
    has_gaps = bool(elements) and max(elements) - min(elements) != 4 * (len(elements) - 1)
    assert is_dense(x) == (not has_gaps)
    assert (described_tensors.describe([x]) is not None) == is_dense(x) or not described_tensors._DLPACK_TELLS


def test_elements_that_are_neighbours_are_not_copied():
    for made in NEIGHBOURS.values():
        x = made()
        assert in_one_piece(FLOATS, x, 0).data_ptr() == x.data_ptr()
    rows = GAPS["every other row"]()
    assert in_one_piece(FLOATS, rows, rows.numel() - 1) is rows
    assert in_one_piece(FLOATS, rows, rows.numel()).is_contiguous()


def test_a_large_one_with_gaps_is_read_by_parts_which_need_less_memory():
    with counted_launches() as kernels:
        rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
        rows.add(0, torch.ones(BLOCK * PASS_BLOCKS // 8 + 1, 16, dtype=torch.float16)[:, :-1])
        assert kernels.partial == []


def test_many_partial_rows_of_one_tensor_are_combined(rows):
    x = torch.full((CHUNK * (ROWS_AT_ONCE + 1),), 0.5)
    x[-1] = 7.0
    rows.add(0, x)
    assert_row(resolved(rows)[0], x)
