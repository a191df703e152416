"""Tensors that wait to be read keep little memory, and a value that was overwritten is never recorded."""

import gc
import json
import types
import weakref

import pytest
import torch
from counted_launches import counted_launches, keep_rows_as_on_a_device
from torch import nn

import trainsentry
from trainsentry.collectors.histogram import SLOTS
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import COLUMNS, MAX
from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.rows import device_rows, tensor_lists
from trainsentry.collectors.torch.rows.gathered_tensors import GatherLimits
from trainsentry.collectors.torch.rows.kernels.chunks import ARENA_ROWS
from trainsentry.collectors.torch.rows.kernels.launch_tables import BLOCK, MOST_BLOCKS
from trainsentry.collectors.torch.rows.step_rows import StepRows

pytest.importorskip("triton", minversion="3.4", reason="the kernels need Triton 3.4, which comes with torch 2.8")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(type(CPU), "has_triton", lambda self: True)


def device_step_rows(limits=None):
    rows = StepRows(SeriesTable(), limits=limits, device_rows_on_cpu=True)
    rows.add(0, torch.ones(1))  # the first tensor of a device makes its buffer
    rows.drop()
    return rows


def taken(rows):
    pending = rows.take()
    ids, _, values = pending.resolve()
    return dict(zip(ids.tolist(), values[:, MAX].tolist(), strict=True)), pending.overwritten


def test_tensors_are_read_as_they_were_made():
    rows = device_step_rows()
    tensors = [torch.full((3,), float(i)) for i in range(150)]
    for i, tensor in enumerate(tensors):
        rows.add_shared(i, tensor)
    assert taken(rows) == ({i: float(i) for i in range(150)}, 0)


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda x: x.add_(1),
        lambda x: x.detach().mul_(2),
        lambda x: x.view(-1)[0].fill_(9),
        lambda x: x.untyped_storage().resize_(0),
        lambda x: setattr(x, "data", torch.full((4,), 7.0)),
    ],
    ids=["in place", "through a detached tensor", "through a view", "memory freed", "data replaced"],
)
def test_a_tensor_that_changes_before_it_is_read_has_no_row_and_is_read_at_once_from_then_on(overwrite):
    rows = device_step_rows()
    kept, changed = torch.ones(4), torch.full((4,), 2.0)
    rows.add_shared(1, kept)
    rows.add_shared(2, changed)
    overwrite(changed)
    assert taken(rows) == ({1: 1.0}, 1)

    again = torch.full((4,), 3.0)
    rows.add_shared(1, kept)
    rows.add_shared(2, again)
    again.add_(1)
    assert taken(rows) == ({1: 1.0, 2: 3.0}, 0)


def test_series_that_share_an_overwritten_tensor_are_all_without_a_row():
    rows = device_step_rows()
    shared = torch.ones(4)
    rows.add_shared(1, shared)
    rows.add_shared(2, shared)
    shared.zero_()
    assert taken(rows) == ({}, 2)


class Token:
    """Lives as long as the graph."""


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_series_that_share_a_tensor_which_cannot_be_read_are_all_without_a_row(monkeypatch):
    refused = []
    rows = StepRows(SeriesTable(), refused=refused.append, device_rows_on_cpu=True)
    unreadable = torch.ones(3, dtype=torch.float64)
    monkeypatch.setattr(device_rows, "device_row", lambda *_: 1 / 0)
    rows.add_shared(1, unreadable)
    rows.add_shared(2, unreadable)
    assert taken(rows) == ({}, 0)
    assert len(refused) == 1


def test_lists_whose_lengths_change_at_every_step_are_not_all_remembered(monkeypatch):
    monkeypatch.setattr(tensor_lists, "MOST_KNOWN", 50)
    rows = device_step_rows()
    tensors = [torch.full((2,), float(i)) for i in range(13)]
    for count in (*range(1, 14), 7):
        rows.add_many(list(range(count)), tensors[:count])
        assert taken(rows) == ({i: float(i) for i in range(count)}, 0)
        assert sum(len(known.sizes) for known in rows._lists._lists.values()) <= 50


def test_waiting_tensors_keep_at_most_the_stated_memory_and_no_graph_alive():
    rows = device_step_rows(GatherLimits(tensors=1000, nbytes=10 * 4000))
    graphs = weakref.WeakSet()
    (device,) = rows._devices.values()
    for i in range(53):
        token = Token()
        graphs.add(token)
        rows.add_shared(i, Times.apply(torch.ones(1000, requires_grad=True), token))
        del token
        assert device._gathered.total[0] < 10 * 4000
    gc.collect()
    assert device._gathered.positions  # some wait, without their graphs
    assert not graphs
    assert len(taken(rows)[0]) == 53


def test_the_whole_storage_of_a_view_counts():
    rows = device_step_rows(GatherLimits(tensors=1000, nbytes=4000))
    rows.add_shared(0, torch.ones(1000)[:2])
    (device,) = rows._devices.values()
    assert not device._gathered.positions  # it was read at once: it keeps 4,000 bytes


def owned_bytes(root):
    """Return the bytes of the storages of all tensors that an object of ours holds, by whatever path."""
    storages, seen, stack = {}, set(), [root]
    while stack:
        each = stack.pop()
        if id(each) in seen or isinstance(each, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif type(each).__module__.startswith("trainsentry") or isinstance(each, (dict, list, tuple, set)):
            stack += gc.get_referents(each)
    return sum(storages.values())


@pytest.mark.parametrize("histograms", [False, True])
def test_device_memory_is_rows_arena_tables_and_what_waits(histograms):
    """The documented arithmetic, over all that is held: while tensors wait, and after steps whose lists differ."""
    count, waiting = 2_000, 40
    tensors = [torch.ones(10) for _ in range(count)]
    with counted_launches():
        rows = StepRows(SeriesTable(), device_rows_on_cpu=True, histograms=histograms)
        for step in range(12):
            some = tensors[step * 50 :]  # lists that recur twice each, and whose tables then stay
            for _ in range(2):
                rows.add_many(list(range(len(some))), some)
                for i in range(waiting):
                    rows.add_shared(count + i, torch.ones(1000))
                held = owned_bytes(list(rows._devices.values()))
                rows.take()
        arena, tables = ARENA_ROWS * 16 * 8, MOST_BLOCKS * BLOCK * 8 + 2 * 2**20
        room = 2 * (count + waiting)  # buffers double
        kept = room * (COLUMNS * 8 + histograms * SLOTS * 4) + waiting * 4000 + 8192
        assert arena < held < arena + tables + kept


class InPlaceSum(nn.Module):
    """Adds to its input's projection in place, as residual blocks do that save memory."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        y += 1.0
        return self.second(y)


def train(model, out, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collect = {"activations": {"every": 1}, "gradients": False, "parameters": False, "optimizer_state": False}
    config = {"output_dir": str(out), "collect": collect | {"updates": False}, "strict": True, "detect": False}
    seen = []

    def note(module, args, output):
        seen.append(output.detach().clone())

    model.first.register_forward_hook(note, prepend=True)
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for _ in range(steps):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        records = monitor.records()
    gaps = json.loads((out / "rank0" / "status.json").read_text())["gaps"]
    rows = records[(records.name == "first.output.0") & (records.quantity == "activation_output")]
    return dict(zip(rows.step, rows["max"], strict=True)), [x.max().item() for x in seen], gaps


def test_an_output_that_the_model_adds_to_is_missing_once_then_recorded_as_the_module_made_it(out, monkeypatch):
    keep_rows_as_on_a_device(monkeypatch)
    found, made, gaps = train(InPlaceSum(), out)
    assert set(found) == {1, 2}
    assert found[1] == pytest.approx(made[1])
    assert found[2] == pytest.approx(made[2])
    assert [(gap["sink"], gap["first_step"], gap["last_step"]) for gap in gaps] == [("activations", 0, 0)]
    assert "changed before being read" in gaps[0]["reason"]


class InPlaceReLU(nn.Module):
    """A projection whose activation function works in place."""

    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.first(x))


def test_the_input_of_an_in_place_module_is_read_before_it_runs_so_nothing_is_missing(out, monkeypatch):
    keep_rows_as_on_a_device(monkeypatch)
    found, made, gaps = train(InPlaceReLU(), out)
    assert found == pytest.approx(dict(enumerate(made)))
    assert not gaps
