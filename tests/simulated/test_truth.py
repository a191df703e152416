"""The recorded statistics of a device's tensors are those of their values, in every dtype and format."""

import math

import numpy as np
import on_device
import pytest
import torch
from tiny_models import mlp

from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.collectors.statistics import STATISTICS, reference
from trainsentry.collectors.torch.rows.step_rows import StepRows

NAN, INF = math.nan, math.inf

ODD = {
    "usual": torch.linspace(-3, 5, 1001),
    "huge": torch.tensor([2e38, -1e38, 1.0]),
    "tiny": torch.tensor([1e-38, -2e-38, 1e-30]),
    "not finite": torch.tensor([1.0, NAN, INF, -INF, 2.0]),
    "nothing finite": torch.tensor([NAN, INF]),
    "zeros": torch.tensor([0.0, -0.0, 1.0]),
    "one": torch.tensor(7.0),
    "empty": torch.empty(0),
    "half": torch.tensor([65504.0, -3.0]).half(),
    "bfloat16": torch.linspace(-1, 1, 77).bfloat16(),
    "whole numbers": torch.arange(-5, 100),
    "bool": torch.tensor([True, False, True]),
    "view": torch.arange(24.0).reshape(4, 6).t()[1:, ::2],
    "complex": torch.tensor([3 + 4j, 0j]),
}


def rows_of(tensors, together):
    """Return the recorded rows of tensors, shape (n, 8), read as a list or one by one."""
    table = SeriesTable()
    rows = StepRows(table)
    ids = [table.series_id(Series(str(i), "gradient")) for i in range(len(tensors))]
    if together:
        rows.add_many(ids, tensors)
    else:
        for series_id, x in zip(ids, tensors, strict=True):
            rows.add(series_id, x)
    pending = rows.take()
    pending.wait()
    found, _, values = pending.resolve()
    assert found.tolist() == ids
    return values


def assert_true(values, tensors):
    for row, x in zip(values, tensors, strict=True):
        expected = reference(x.numpy() if x.is_complex() or not x.is_floating_point() else x.double().numpy())
        for column, name in enumerate(STATISTICS):
            bound = 1e-5 * max(expected["norm"] / math.sqrt(max(x.numel(), 1)), 1e-38)
            assert row[column] == pytest.approx(expected[name], rel=1e-5, abs=bound, nan_ok=True), (name, x)


@pytest.mark.parametrize("together", [False, True])
def test_statistics_are_those_of_the_values(together):
    tensors = list(ODD.values())
    assert_true(rows_of([x.to("npu") for x in tensors], together), tensors)


def test_every_record_of_a_step_equals_the_same_run_on_the_cpu(tmp_path):
    _, _, there, none = on_device.watched(tmp_path / "npu", "npu", 3, mlp)
    _, _, here, _ = on_device.watched(tmp_path / "cpu", "cpu", 3, mlp)
    assert none == ()
    keys = ["step", "name", "quantity", "index"]
    there, here = (t.set_index(keys).sort_index() for t in (there, here))
    assert list(there.index) == list(here.index)
    for name in STATISTICS:
        bound = 1e-5 * np.maximum(here["norm"].to_numpy(), 1e-12)
        off = np.abs(there[name].to_numpy() - here[name].to_numpy())
        assert ((off <= bound) | (np.isnan(there[name]) & np.isnan(here[name]))).all(), name


def test_a_tensor_in_a_private_format_keeps_it():
    import torch_npu

    x = torch.tensor([1.0, 2.0, 3.0, -9.0])
    private = torch_npu.npu_format_cast(x.to("npu"), 29)
    rows_of([private], together=True)
    assert int(torch_npu.get_npu_format(private)) == 29
