"""A tensor that does not lie in memory as it did is never read as if it did, whichever way it is looked at."""

import gc
import weakref

import pytest
import torch
from counted_launches import counted_launches
from torch import nn
from unlike_tensors import unlike_tensors

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.shared.recurring_arrays import RecurringArray
from trainsentry.collectors.statistics import INFS, MAX, MIN, NANS, NORM, VALUE, ZEROS
from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.device.pinned_tables import PinnedTables
from trainsentry.collectors.torch.rows import described_tensors, shared_rows
from trainsentry.collectors.torch.rows.described_tensors import describe, described_addresses
from trainsentry.collectors.torch.rows.kernels import launch_tables
from trainsentry.collectors.torch.rows.step_rows import StepRows

pytest.importorskip("triton", minversion="3.4", reason="the kernels need Triton 3.4, which comes with torch 2.8")


@pytest.fixture(params=["C functions", "methods"])
def looked_at(request, monkeypatch):
    """Tensors are looked at by DLPack's C functions, or by torch's methods."""
    if request.param == "C functions" and not described_tensors._DLPACK_TELLS:
        pytest.skip("this torch has no C functions of DLPack, or there was no compiler")
    if request.param == "methods":
        monkeypatch.setattr(described_tensors, "_DLPACK_TELLS", False)
        monkeypatch.setattr(shared_rows, "described_address", described_tensors._compared_address)


def test_one_that_lies_in_memory_in_another_order_is_as_described(looked_at):
    description, transposed = describe([torch.ones(2, 3)]), torch.ones(3, 2).t()
    assert described_addresses([transposed], description) == [transposed.data_ptr()]


@pytest.mark.parametrize("name", sorted(unlike_tensors().keys() - {"transposed"}))
def test_a_tensor_that_differs_has_no_address_and_raises_nothing(looked_at, name):
    x, beside = torch.ones(2, 3), torch.ones(4)
    description = describe([x, beside])
    again = [torch.zeros(2, 3), torch.zeros(4)]
    assert described_addresses(again, description) == [y.data_ptr() for y in again]
    assert described_addresses([unlike_tensors()[name], beside], description) is None
    assert described_addresses([beside, unlike_tensors()[name]], description) is None
    assert not shared_rows.described_address(unlike_tensors()[name], describe([x]), torch.Tensor.is_neg)
    describe([unlike_tensors()[name]])  # raises nothing either


def test_values_inside_a_transform_have_no_address(looked_at):
    description, found = describe([torch.ones(2, 3)]), []

    def note(x):
        found.append(described_addresses([x], description))
        return x.sum()

    torch.vmap(note)(torch.ones(5, 2, 3))
    torch.func.grad(note)(torch.ones(2, 3))
    assert found == [None, None]


def test_a_description_keeps_no_tensor_alive(looked_at):
    x = torch.ones(2, 3)
    description, dead = describe([x]), weakref.ref(x)
    described_addresses([x], description)
    del x
    gc.collect()
    assert dead() is None


def device_rows(monkeypatch):
    monkeypatch.setattr(type(CPU), "has_triton", lambda self: True)  # in Triton's interpreter
    return StepRows(SeriesTable(), device_rows_on_cpu=True)


def taken(rows):
    ids, layouts, values = rows.take().resolve()
    shapes = [rows.table.layouts[layout].shape for layout in layouts]
    return {i: (shape, row) for i, shape, row in zip(ids.tolist(), shapes, values, strict=True)}


CHANGES = {
    "nothing": lambda x: x.data.fill_(5.0),
    "values": lambda x: x.data.copy_(torch.full((2, 3), 6.0)),
    "memory": lambda x: setattr(x, "data", torch.full((2, 3), 7.0)),
    "shape": lambda x: setattr(x, "data", torch.full((4, 5), 8.0)),
    "the same memory, another shape": lambda x: setattr(x, "data", x.data.view(3, 2)),
    "transposed": lambda x: setattr(x, "data", torch.arange(6.0).view(3, 2).t()),
    "transposed in place": lambda x: x.t_(),
    "dtype": lambda x: setattr(x, "data", torch.full((2, 3), 9.0, dtype=torch.bfloat16)),
    "every second element": lambda x: setattr(x, "data", torch.arange(12.0).view(2, 6)[:, ::2]),
    "unaligned": lambda x: setattr(x, "data", torch.arange(7.0)[1:].view(2, 3)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shared", [False, True], ids=["list", "waiting"])
def test_a_tensor_that_changes_between_steps_is_read_as_it_is_then(looked_at, monkeypatch, change, shared):
    rows = device_rows(monkeypatch)
    tensors = [nn.Parameter(torch.full((2, 3), float(i)), requires_grad=False) for i in range(4)]
    for step in range(6):
        if step == 4:
            CHANGES[change](tensors[2])
        if shared:
            for i, x in enumerate(tensors):
                rows.add_shared(i, x)
                rows.add_shared(10 + i, x)
        else:
            rows.add_many([0, 1, 2, 3], tensors)
        found = taken(rows)
        for i, x in enumerate(tensors):
            for series in (i, 10 + i) if shared else (i,):
                shape, row = found[series]
                assert shape == tuple(x.shape)
                wide = x.detach().double()
                assert (row[MIN], row[MAX]) == (wide.min().item(), wide.max().item())
                assert row[NORM] == pytest.approx(wide.norm().item(), rel=1e-6)


def test_scalars_of_a_device_are_as_those_of_the_host(monkeypatch):
    values = [0.0, -2.5, float("nan"), float("inf"), float("-inf")]
    on_device, on_host = device_rows(monkeypatch), StepRows(SeriesTable())
    for i, value in enumerate(values):
        on_device.add_scalar(i, torch.tensor(value))
        on_host.add_scalar(i, value)
    found, expected = taken(on_device), taken(on_host)
    for i in range(len(values)):
        columns = [MIN, MAX, NORM, NANS, INFS, ZEROS, VALUE]
        assert found[i][1][columns].tolist() == pytest.approx(expected[i][1][columns].tolist(), nan_ok=True)


def sent_in_each_step(monkeypatch, lists, steps):
    """Return the numbers that are sent to the device in each step that reads lists of tensors."""
    sent, send, renew = [], PinnedTables.send, PinnedTables.renew

    def note_all(self, parts, into=None):
        sent[-1] += sum(map(len, parts))
        return send(self, parts, into)

    def note(self, table, memory, numbers):
        sent[-1] += len(numbers)
        renew(self, table, memory, numbers)

    monkeypatch.setattr(PinnedTables, "send", note_all)
    monkeypatch.setattr(PinnedTables, "renew", note)
    with counted_launches():
        rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
        for step in range(steps):
            sent.append(0)
            for number, tensors in enumerate(lists(step)):
                rows.add_many([100 * number + i for i in range(len(tensors))], tensors)
            rows.take()
    return sent, rows


def test_of_a_list_that_recurs_only_addresses_that_changed_are_sent(monkeypatch):
    same, ones = [torch.ones(5) for _ in range(20)], [torch.ones(7) for _ in range(30)]
    sent, _ = sent_in_each_step(monkeypatch, lambda step: [same, ones[step : step + 9]], 6)
    assert sent[0] == (20 + 9) * (3 + 4)
    assert sent[2:] == [9] * 4


def test_lists_that_never_recur_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(launch_tables, "BLOCK", 200)
    monkeypatch.setattr(launch_tables, "MOST_BLOCKS", 3)
    monkeypatch.setattr(launch_tables, "MOST_MET", 10)
    ones = [torch.ones(5) for _ in range(60)]
    _, rows = sent_in_each_step(monkeypatch, lambda step: [ones[: 5 + step // 3]], 90)
    (device,) = rows._devices.values()
    tables = device.fused.tables
    assert len(tables._blocks) == 3
    assert len(tables._met) <= 10
    assert len(tables._kept) <= 3 * 200 / 5


def test_an_array_recurs_with_its_list_alone():
    recurring, numbers = RecurringArray("int32"), [1, 2, 300]
    first = recurring.of(numbers)
    assert recurring.of([1, 2, 300]) is first
    numbers.append(4)
    assert recurring.of(numbers).tolist() == [1, 2, 300, 4]
    assert first.tolist() == [1, 2, 300]
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 9
