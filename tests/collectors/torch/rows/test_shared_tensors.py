"""The compiled way of noting a tensor that several series share does what Python's way does, and leaks nothing."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.torch.rows import shared_rows
from trainsentry.collectors.torch.rows.described_tensors import compiled_share
from trainsentry.collectors.torch.rows.step_rows import StepRows

pytestmark = pytest.mark.skipif(compiled_share is None, reason="no compiler, or a torch without DLPack's C functions")


def odd_tensors():
    """Return {what it is: a function that makes it}; each step has new tensors of the same kind."""
    whole = torch.arange(24.0).reshape(4, 6)
    return {
        "plain": whole.clone,
        "with a graph": lambda: nn.Parameter(whole.clone()) * 2,
        "all of its base in order": lambda: whole.clone().view(2, 12),
        "all of its base in another order": lambda: whole.clone().t(),
        "in order, of a base that is not": lambda: torch.empty(6, 4).t().copy_(whole).t(),
        "a part": lambda: whole.clone()[:2],
        "a part that is not dense": lambda: whole.clone()[:, :2],
        "other bits": lambda: whole.clone().view(torch.int32),
        "negated": lambda: torch.complex(whole, whole).conj().imag,
        "whole numbers": lambda: torch.arange(7),
        "empty": lambda: torch.empty(0, 3),
        "a parameter": lambda: nn.Parameter(whole.clone()),
        "sparse": whole.to_sparse,
        "half": whole.half,
        "double": whole.double,
        "of inference": lambda: _of_inference(whole),
    }


def _of_inference(x):
    with torch.inference_mode():
        return x + 1


def recorded(make, share, monkeypatch, on_device):
    """Return what four steps record of tensors that series share, of their bases, and of some that change."""
    monkeypatch.setattr(shared_rows, "share", share)
    rows, found = StepRows(SeriesTable(), device_rows_on_cpu=on_device), []
    for step in range(4):
        first, other = make(), make()
        rows.add_shared(0, first)
        rows.add_shared(1, first)
        rows.add_shared(2, other)
        rows.add_shared(3, first.detach())
        rows.add_shared(5, first if first._base is None else first._base)
        if step == 2 and not first.is_inference() and not first.is_sparse:
            rows.read_gathered()
            with torch.no_grad():
                first.add_(1)
        rows.add_shared(4, first)
        pending = rows.take()
        ids, layouts, values = pending.resolve()
        kinds = [rows.table.layouts[i] for i in layouts]
        aliases = [part.tolist() for part in pending.aliases]
        found.append((ids.tolist(), kinds, values.tolist(), aliases, pending.overwritten))
    return repr(found)  # NaN is equal to itself there


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("what", odd_tensors())
def test_the_compiled_way_records_what_pythons_way_does(what, on_device, monkeypatch):
    make = odd_tensors()[what]
    plain = recorded(make, shared_rows._share_plainly, monkeypatch, on_device)
    assert recorded(make, compiled_share, monkeypatch, on_device) == plain


def test_a_part_of_much_memory_counts_with_all_that_it_keeps_in_use():
    rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
    rows.add(0, torch.ones(1))
    for step in range(3):
        rows.add_shared(1, torch.ones(10))
        rows.add_shared(2, torch.ones(10))
        (device,) = rows._devices.values()
        before = device._gathered.total[0]
        rows.add_shared(3, torch.ones(10) if step < 2 else torch.ones(1000)[:10])
        assert device._gathered.total[0] - before == (40 if step < 2 else 4000)
        rows.take()


def test_nothing_is_kept_of_a_step_that_is_over():
    rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
    rows.add(0, torch.ones(1))
    alive, blocks = [], []
    for step in range(60):
        tensors = [nn.Parameter(torch.ones(5)) * i for i in range(80)]
        for i, x in enumerate(tensors):
            rows.add_shared(2 * i, x)
            rows.add_shared(2 * i + 1, x)
            rows.add_shared(200 + i, x.view(5, 1))
        alive += [weakref.ref(tensors[0]), weakref.ref(tensors[-1])]
        del tensors, x
        rows.take().resolve()
        if step in {20, 59}:  # half a second each, among thousands of tests
            gc.collect()
            blocks.append(sys.getallocatedblocks())
    assert not any(reference() is not None for reference in alive)
    assert blocks[1] - blocks[0] < 200  # 39 steps of 240 calls
