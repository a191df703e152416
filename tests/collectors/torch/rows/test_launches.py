"""A step takes few launches, whatever the number of tensors; tables are pinned once."""

import sys

import pytest
import torch
from counted_launches import counted_launches
from torch import nn
from torch.nn import functional as F

import trainsentry
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.torch.device import pinned_tables
from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.device.cuda import CUDA
from trainsentry.collectors.torch.device.pinned_tables import PinnedTables
from trainsentry.collectors.torch.rows.device_rows import FIRST_ROWS
from trainsentry.collectors.torch.rows.kernels.chunks import ARENA_ROWS, MAX_PROGRAMS, TILE, cut
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.monitor.demo.model import Gpt, GptConfig

pytest.importorskip("triton", minversion="3.4", reason="the kernels need Triton 3.4, which comes with torch 2.8")

PARTS = ("gradients", "parameters", "optimizer_state", "updates", "activations")


class ResNet(nn.Module):
    """Convolutions, batch norms and in-place ReLUs with a residual sum, as torchvision's ResNets are made."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(6)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def models():
    tokens, images = torch.randint(256, (2, 9)), torch.randn(2, 3, 8, 8)
    labels = torch.tensor([0, 1])

    def language(model):
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return {
        "gpt": (Gpt(GptConfig(layers=6, width=24)), language),
        "deep gpt": (Gpt(GptConfig(layers=48, width=12, heads=2)), language),
        "resnet": (ResNet(), lambda model: F.cross_entropy(model(images), labels)),
        "channels-last resnet": (
            ResNet().to(memory_format=torch.channels_last),
            lambda model: F.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels),
        ),
    }


def launches_of(name, parts, out, steps=3):
    """Return the partial and combining launches of the last of some steps, and the tensors read in it."""
    torch.manual_seed(0)
    model, loss = models()[name]
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    collect = {part: {"every": 1} if part in parts else False for part in PARTS} | {"communication": False}
    config = {"output_dir": str(out), "collect": collect, "detect": False, "on_incident": False, "strict": True}
    with counted_launches() as kernels, trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for _ in range(steps):
            kernels.partial.clear()
            kernels.combined.clear()
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        tensors = len(monitor.records(last=1))
    return len(kernels.partial), len(kernels.combined), tensors


@pytest.mark.parametrize("name", ["gpt", "deep gpt", "resnet", "channels-last resnet"])
@pytest.mark.parametrize("part", ["gradients", "parameters", "optimizer_state", "updates"])
def test_every_tensor_of_a_part_is_read_by_one_launch_a_dtype_and_combined_by_one_more(name, part, out):
    partial, combined, tensors = launches_of(name, [part], out)
    assert tensors > 20
    buffers = part == "parameters" and name.endswith(
        "resnet"
    )  # running statistics, and counts of batches in whole numbers
    assert (partial, combined) == (1 + 2 * buffers, 1)


@pytest.mark.parametrize(
    ("name", "in_place"), [("gpt", 0), ("deep gpt", 0), ("resnet", 6), ("channels-last resnet", 6)]
)
def test_activations_and_their_gradients_take_a_launch_for_each_64_and_for_each_in_place_module(name, in_place, out):
    partial, combined, tensors = launches_of(name, ["activations"], out)
    assert tensors > 40
    assert partial <= tensors / 64 + 2 + in_place  # the forward and the backward pass leave a rest each
    assert combined == 1


@pytest.mark.parametrize(("part", "most"), [("gradients", 2), ("parameters", 2), ("optimizer_state", 1),
                                            ("updates", 5), ("activations", 3)])  # fmt: skip
def test_python_is_called_a_few_times_a_tensor(part, most, out, monkeypatch):
    """Where a device's stream must be asked whether it is captured, too, which takes a call a tensor."""
    torch.manual_seed(0)
    model, loss = models()["gpt"]
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    collect = {each: {"every": 1} if each == part else False for each in PARTS} | {"communication": False}
    config = {"output_dir": str(out), "collect": collect, "detect": False, "on_incident": False, "strict": True}
    calls, captured = 0, lambda: False

    def is_reading(frame):
        """Whether a frame is of the rows, or called by them: of the device's object, or torch's question."""
        asks = "/collectors/torch/device/" in frame.f_code.co_filename or frame.f_code is captured.__code__
        return "/collectors/torch/rows/" in frame.f_code.co_filename or (asks and is_reading(frame.f_back))

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and is_reading(frame)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", captured)

    with counted_launches(), trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        monitor._loop.watch.rows._accelerator = CUDA  # as `torch.accelerator` would tell
        for step in range(4):
            sys.setprofile(count if step == 3 else None)
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        sys.setprofile(None)
        tensors = len(monitor.records(last=1))
    assert tensors >= 77
    assert 0 < calls <= most * tensors


def test_everything_together_is_combined_once_and_once_for_updates(out):
    partial, combined, _ = launches_of("gpt", PARTS, out)
    assert partial <= 4 + 209 / 64 + 2
    assert combined <= 2


def test_tensors_of_several_dtypes_take_a_launch_each_however_they_are_mixed():
    with counted_launches() as kernels:
        rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        tensors = [torch.ones(5, dtype=dtypes[i % 3]) for i in range(90)]
        rows.add_many(list(range(90)), tensors)
        rows.take()
    assert len(kernels.partial) == 3
    assert len(kernels.combined) == 1


@pytest.mark.parametrize("sizes", [(1,), (0, 3, 0), tuple(range(500)), (TILE, TILE + 1), (10**9,), (10**6,) * 3000])
def test_a_cut_reads_each_element_once_by_a_bounded_number_of_programs(sizes):
    found = cut(sizes)
    for number, size in enumerate(sizes[:50]):
        chunks = found.places[found.places >> 32 == number] & 0xFFFFFFFF
        assert chunks.tolist() == list(range(-(-size // found.chunk)))
    assert found.total <= min(ARENA_ROWS, MAX_PROGRAMS + len(sizes))
    assert found.chunk % TILE == 0


class Event:
    """Stands in for a device's event, which is complete when `done` says so."""

    done = True

    def __init__(self, _device):
        pass

    def record(self):
        pass

    def query(self):
        return Event.done


def test_pinned_buffers_are_written_again_once_they_are_copied_and_not_before(monkeypatch):
    monkeypatch.setattr(type(CPU), "on_host", False)
    monkeypatch.setattr(pinned_tables.torch, "Event", Event)
    empty = torch.empty
    pinned = []

    def without_pinning(*args, pin_memory=False, **kwargs):
        pinned.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(pinned_tables.torch, "empty", without_pinning)
    tables = PinnedTables(torch.device("cpu"))
    parts = [torch.arange(5).numpy(), torch.arange(7).numpy()]
    for _ in range(20):
        assert tables.send(parts).tolist() == [*range(5), *range(7)]
    assert tables.allocations == pinned.count(True) == 1
    monkeypatch.setattr(Event, "done", False)
    for _ in range(20):
        tables.send(parts)
    assert tables.allocations == 21
    assert len(tables._buffers) == pinned_tables.MOST_BUFFERS  # the rest went back to torch


@pytest.mark.parametrize("kernel", ["partial_rows", "combine_rows"])
def test_launches_that_fail_take_no_room_from_later_ones(monkeypatch, kernel):
    """Partial rows are written where a launch is told to, too."""
    tensors = [torch.ones(TILE * 300)] * 40
    programs = cut(tuple(x.numel() for x in tensors)).total
    ends = []

    class OutOfMemory:
        def __getitem__(self, grid):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with counted_launches() as kernels:
        rows = StepRows(SeriesTable(), refused=lambda _: None, device_rows_on_cpu=True)
        rows.add(0, torch.ones(3))
        rows.drop()
        (device,) = rows._devices.values()
        launch = device.fused._launch

        def launched(cutting, x, table, first, *args, **kwargs):
            ends.append(first + cutting.total)
            launch(cutting, x, table, first, *args, **kwargs)

        monkeypatch.setattr(device.fused, "_launch", launched)
        with monkeypatch.context() as patch:
            patch.setattr(type(kernels), kernel, OutOfMemory())
            for _ in range(2 * ARENA_ROWS // programs + 2):
                rows.add_many([*range(len(tensors))], tensors)
                rows.take()
        rows.add_many([*range(len(tensors))], tensors)
        rows.take()
    assert len(ends) > ARENA_ROWS // programs
    assert max(ends) <= ARENA_ROWS


@pytest.mark.parametrize("histograms", [False, True])
def test_a_buffer_that_could_not_grow_is_never_written_past_its_end(monkeypatch, histograms):
    """Kernels write where they are told to, beyond a buffer into the training's own tensors."""
    refused, ends = [], []
    tensors = [torch.ones(4)] * (FIRST_ROWS + 40)

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def begun(slot, dense, eps, buffer, counters):
        ends.append((slot + len(dense.sizes), len(buffer), counters and len(counters.table)))

    with counted_launches():
        rows = StepRows(SeriesTable(), refused=refused.append, device_rows_on_cpu=True, histograms=histograms)
        rows.add(0, torch.ones(3))
        rows.drop()
        (device,) = rows._devices.values()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros" if histograms else "empty", out_of_memory)
            rows.add_many([*range(len(tensors))], tensors)
        assert [type(error) for error in refused] == [torch.OutOfMemoryError]
        rows.drop()
        monkeypatch.setattr(device.fused, "begin", begun)
        rows.add_many([*range(len(tensors))], tensors)
    assert [end for end, *_ in ends] == [len(tensors)]
    assert all(end <= room and (counted is None or end <= counted) for end, room, counted in ends)
