"""A list of tensors in host memory that is as it was in the step before is read without a call for each of them."""

import sys

import pytest
import torch
from torch import nn
from unlike_tensors import unlike_tensors

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.torch.rows import tensor_lists
from trainsentry.collectors.torch.rows.described_tensors import compiled_read
from trainsentry.collectors.torch.rows.step_rows import StepRows

compiled = pytest.mark.skipif(compiled_read is None, reason="no compiler, or a torch without DLPack's C functions")


def lists():
    """Three steps of one list: of several dtypes and shapes, one of them large enough for several threads."""
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        made = [torch.randn(shape, generator=generator) for shape in ((3, 4), (70_000,), (), (5, 2, 2))]
        made[1][step] = float("nan")
        yield [made[0], made[1].bfloat16(), made[2].double(), nn.Parameter(made[3].half())]


def read(steps, *, known, monkeypatch, divisor=None, norms=None, histograms=False):
    """Return what is recorded of lists; where they are not `known`, each tensor is looked at anew."""
    if not known:
        monkeypatch.setattr(tensor_lists, "compiled_read", None)
    rows, found = StepRows(SeriesTable(), histograms=histograms), []
    for tensors in steps:
        rows.add(9, torch.ones(2))
        rows.add_many([*range(len(tensors))], tensors, divisor, norms)
        pending = rows.take()
        ids, layouts, values = pending.resolve()
        counted = pending.find_histograms()
        kinds = [rows.table.layouts[i] for i in layouts]
        found.append((ids.tolist(), kinds, values.tolist(), counted and counted.encode()))
    return repr(found)


@compiled
@pytest.mark.parametrize("histograms", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_known_list_has_the_rows_that_it_had_when_it_was_looked_at(scaled, histograms, monkeypatch):
    with_it = {"histograms": histograms, "monkeypatch": monkeypatch}
    if scaled:
        with_it |= {"divisor": torch.tensor(8.0), "norms": torch.tensor([1.0, 2.0, 0.0, 3.0])}
    assert read(lists(), known=True, **with_it) == read(lists(), known=False, **with_it)


@compiled
@pytest.mark.parametrize("name", unlike_tensors())
def test_a_tensor_that_is_not_as_it_was_is_looked_at_anew(name, monkeypatch):
    def steps():
        usual = [torch.full((2, 3), 2.0), torch.ones(4)]
        return [usual, usual, [unlike_tensors()[name], usual[1]], [usual[0], unlike_tensors()[name]], usual]

    assert read(steps(), known=True, monkeypatch=monkeypatch) == read(steps(), known=False, monkeypatch=monkeypatch)


@compiled
def test_a_known_list_costs_no_call_for_each_tensor():
    rows, calls = StepRows(SeriesTable()), {}
    tensors = {size: [torch.ones(3) for _ in range(size)] for size in (10, 200)}
    for size, listed in tensors.items():
        for _ in range(3):
            calls[size] = 0

            def count(_frame, event, _argument, size=size):
                calls[size] += event == "call"

            sys.setprofile(count)
            rows.add_many([*range(size)], listed)
            sys.setprofile(None)
            rows.take()
    assert calls[10] == calls[200]
