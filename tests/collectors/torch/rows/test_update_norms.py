"""An update's norm is divided by that of the weight, which is not read again where the weight has a row."""

import numpy as np
import pytest
import torch
from step_records import resolved
from torch import nn

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import NORM, VALUE
from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.parameters.readers import UpdateReader
from trainsentry.collectors.torch.rows import step_rows
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames


@pytest.fixture(params=["host", "kernels", "operations"])
def make_rows(request, monkeypatch):
    """Make rows in host memory, as on a device whose kernels run, and as on one without."""
    if request.param == "kernels":
        pytest.importorskip("triton", minversion="3.4", reason="the kernels need Triton 3.4, as of torch 2.8")
        monkeypatch.setattr(type(CPU), "has_triton", lambda self: True)  # conftest.py has told Triton to interpret
    return lambda: StepRows(SeriesTable(), device_rows_on_cpu=request.param != "host")


@pytest.fixture
def read_again(monkeypatch):
    """Note each time that weights are read for their norms alone."""
    found, on_host, elsewhere = [], step_rows.rows_and_counts, torch._foreach_norm
    monkeypatch.setattr(step_rows, "rows_and_counts", lambda *a, **k: found.append(1) or on_host(*a, **k))

    def norms(tensors, order, dtype=None):
        found.append(1)
        return elsewhere(tensors, order, dtype)

    monkeypatch.setattr(torch, "_foreach_norm", norms)
    return found


def updated(rows, of, *, reads_weights):
    """Return the rows of an update that adds 0.1 to the first parameter, 0.2 to the second, and so on."""
    updates = UpdateReader(rows)
    if reads_weights:
        ids = [rows.parameter_ids.id_of(p, "parameter") for p in of]
        rows.add_parameters(ids, of, [p.parameter for p in of])
    updates.keep(of)
    with torch.no_grad():
        for i, p in enumerate(of):
            p.parameter.add_(0.1 * (i + 1))
    updates.read()
    with torch.no_grad():
        for i, p in enumerate(of):
            p.parameter.sub_(0.1 * (i + 1))
    pending = rows.take()
    pending.wait()
    return pending.resolve()[2][-len(of) :]


def parameters():
    torch.manual_seed(0)
    names = ModelNames()
    names.add([nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))], [])
    return names.parameters


def test_norms_of_weights_are_those_of_their_rows_where_there_are_any(make_rows, read_again):
    of, found, times = parameters(), [], []
    weights = [p.parameter.detach().double().norm().item() for p in of]
    for reads_weights in (True, False):
        read_again.clear()
        values = updated(make_rows(), of, reads_weights=reads_weights)
        times.append(len(read_again))
        found.append(values[:, VALUE])
        np.testing.assert_allclose(values[:, VALUE], values[:, NORM] / weights, rtol=1e-6)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    assert times[1] > times[0], "only where the weights had no rows"


def test_norms_are_read_where_other_rows_stand_between_those_of_the_weights(make_rows):
    of, rows = parameters(), make_rows()
    ids = [rows.parameter_ids.id_of(p, "parameter") for p in of]
    for series_id, p in zip(ids, of, strict=True):
        rows.add(series_id, p.parameter.detach())
        rows.add(series_id + 100, torch.full((3,), 9.0))
    weights = [p.parameter.detach().double().norm().item() for p in of]
    values = updated(rows, of, reads_weights=False)
    np.testing.assert_allclose(values[:, VALUE], values[:, NORM] / weights, rtol=1e-6)


def test_a_row_that_was_lost_is_no_norm(monkeypatch):
    pytest.importorskip("triton", minversion="3.4", reason="the kernels need Triton 3.4, as of torch 2.8")
    monkeypatch.setattr(type(CPU), "has_triton", lambda self: True)
    of, rows = parameters(), StepRows(SeriesTable(), device_rows_on_cpu=True)
    ids = [rows.parameter_ids.id_of(p, "parameter") for p in of]
    rows.add_parameters(ids, of, [p.parameter for p in of])
    (device,) = rows._devices.values()
    monkeypatch.setattr(device.fused, "combine", lambda _: 1 / 0)  # the weights' rows are lost
    weights = [p.parameter.detach().double().norm().item() for p in of]
    values = updated(rows, of, reads_weights=False)
    assert len(values) == len(of), "of the updates alone"
    np.testing.assert_allclose(values[:, VALUE], values[:, NORM] / weights, rtol=1e-6)


def test_the_norms_outlive_the_rows_of_weights_that_are_taken_before_the_update(make_rows):
    """As where a step is examined before its update."""
    of, rows = parameters(), make_rows()
    updates = UpdateReader(rows)
    ids = [rows.parameter_ids.id_of(p, "parameter") for p in of]
    rows.add_parameters(ids, of, [p.parameter for p in of])
    weights = [p.parameter.detach().double().norm().item() for p in of]
    updates.keep(of)
    rows.take()
    with torch.no_grad():
        for p in of:
            p.parameter.add_(0.25)
    updates.read()
    values = list(resolved(rows).values())
    np.testing.assert_allclose([v[VALUE] for v in values], [v[NORM] / w for v, w in zip(values, weights, strict=True)])


def test_norms_of_weights_of_several_kinds_are_each_their_own(make_rows):
    """Complex weights, wide ones and empty ones are not read with the others."""
    torch.manual_seed(0)
    of_kinds = [torch.float32, torch.complex64, torch.float32, torch.float64, torch.float16]
    model = nn.ParameterList(nn.Parameter(torch.randn(3, 4).to(dtype)) for dtype in of_kinds)
    model.append(nn.Parameter(torch.randn(6, 4).t()))
    names = ModelNames()
    names.add([model], [])
    weights = [p.parameter.detach().abs().double().norm().item() for p in names.parameters]
    values = updated(make_rows(), names.parameters, reads_weights=True)
    np.testing.assert_allclose(values[:, VALUE], values[:, NORM] / weights, rtol=1e-3)
