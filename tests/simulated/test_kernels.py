"""The fused kernels on a device: truth, launches, streams, and dumps, beside what lies in host memory."""

import json

import on_device
import pytest
import simulated_npu
import torch
import torch.nn.functional as F
from simulated_npu.kernels import interpreted_kernels
from step_records import resolved
from tiny_models import mlp
from torch import nn

import trainsentry
from trainsentry import PrecisionDebugger
from trainsentry.collectors.histogram import counts_of, without_empty_bins
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM
from trainsentry.collectors.torch.device.npu import NPU
from trainsentry.collectors.torch.device.pinned_tables import MOST_BUFFERS
from trainsentry.collectors.torch.rows import device_rows, step_rows
from trainsentry.collectors.torch.rows.host_statistics import address_of
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.saving import load_tensor


@pytest.fixture(autouse=True)
def kernels():
    with interpreted_kernels() as found:
        yield found


def assert_rows(found, tensors):
    for i, x in tensors.items():
        wide = x.cpu().double()
        assert found[i][NORM] == pytest.approx(wide.norm().item(), rel=1e-5)
        assert found[i][MEAN] == pytest.approx(wide.mean().item(), abs=1e-6)
        assert (found[i][MIN], found[i][MAX]) == (wide.min().item(), wide.max().item())


def test_what_lies_in_host_memory_beside_device_tensors_costs_no_launch(kernels):
    rows = StepRows(SeriesTable())
    mixed = {}
    for i in range(40):  # as AdamW's state: two moments on the device, the step on the host
        mixed |= {3 * i: torch.randn(7, i + 1).to("npu"), 3 * i + 1: torch.randn(5).to("npu").half()}
        mixed[3 * i + 2] = torch.tensor(float(i))
    rows.add_many(list(mixed), list(mixed.values()))
    assert_rows(resolved(rows), mixed)
    assert kernels.launches == ["partial_rows"] * 2 + ["combine_rows"]


def test_a_list_of_host_and_device_that_recurs_is_looked_at_as_one(kernels, monkeypatch):
    asked = []
    monkeypatch.setattr(step_rows, "address_of", lambda x: asked.append(x) or address_of(x))
    rows = StepRows(SeriesTable())
    for step in range(3):
        mixed = {2 * i: torch.randn(7, i + 1).to("npu") for i in range(9)}
        mixed |= {2 * i + 1: torch.tensor(float(i + step)) for i in range(9)}
        rows.add_many(sorted(mixed), [mixed[i] for i in sorted(mixed)])
        assert_rows(resolved(rows), mixed)
        assert len(asked) == 9  # in the first step
    mixed[3], mixed[4] = torch.ones(4), torch.randn(3, 3).to("npu")  # the list changes, on either side
    rows.add_many(sorted(mixed), [mixed[i] for i in sorted(mixed)])
    assert_rows(resolved(rows), mixed)
    mixed[5] = torch.randn(2).to("npu")  # what was on the host is on the device
    rows.add_many(sorted(mixed), [mixed[i] for i in sorted(mixed)])
    assert_rows(resolved(rows), mixed)


@pytest.mark.parametrize("fused", [True, False])
def test_histograms_are_counted_by_the_same_launches(kernels, monkeypatch, fused):
    if not fused:
        monkeypatch.setattr(device_rows, "kernels_for", lambda device: None)
    rows = StepRows(SeriesTable(), histograms=True)
    tensors = {i: torch.randn(300, i + 1).to("npu", torch.half if i % 3 else torch.float) for i in range(9)}
    for _ in range(2):  # the counters are set to 0 between steps
        rows.add_many(list(tensors), list(tensors.values()), torch.tensor(0.5).to("npu"))
        rows.add_shared(50, tensors[3])
        pending = rows.take()
        pending.wait()
        ids, _, _ = pending.resolve()
        found = dict(zip(ids.tolist(), pending.find_histograms().texts(), strict=True))
    expected = {i: counts_of(x.cpu().double().numpy(), 2.0) for i, x in tensors.items()}
    expected[50] = counts_of(tensors[3].cpu().double().numpy())
    assert found == {i: without_empty_bins(counts[None]).texts()[0] for i, counts in expected.items()}
    assert kernels.launches.count("partial_rows") == (6 if fused else 0)


def test_adamw_state_is_read_by_one_launch_though_its_step_is_on_the_host(kernels, out):
    model, optimizer = on_device.make("npu", mlp)
    collect = {part: part == "optimizer_state" and {"every": 1} for part in on_device.EVERY_STEP}
    config = {"output_dir": str(out), "collect": collect, "strict": True, "detect": False}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        on_device.train(model, optimizer, on_device.batches(model, 2, "npu"))
        kernels.launches.clear()
        on_device.train(model, optimizer, on_device.batches(model, 1, "npu"))
        records = monitor.records(last=1)
    assert {"exp_avg", "exp_avg_sq", "step"} <= set(records.quantity)
    assert not any(x.is_cpu for x in optimizer.state[next(model.parameters())].values() if x.dim())
    assert kernels.launches == ["partial_rows", "combine_rows"]


def test_tensors_of_two_streams_are_read_on_the_stream_that_made_them(kernels):
    rows = StepRows(SeriesTable())
    rows.add(99, torch.ones(1).to("npu"))
    tensors = {i: torch.randn(9).to("npu") for i in range(6)}
    side = torch.npu.Stream()
    for i, x in tensors.items():
        with torch.npu.stream(side if i in {2, 3} else torch.npu.current_stream()):
            rows.add_shared(i, x)
    before = simulated_npu.counter("recorded streams")
    assert_rows(resolved(rows), tensors)
    for i in range(100, 104):
        rows.add_shared(i, torch.randn(9).to("npu"))
    resolved(rows)
    # Two were read before there was a second stream; the memory of all others waits for the kernel that reads it.
    assert simulated_npu.counter("recorded streams") - before == 2 + 4


def test_a_few_pinned_tables_serve_all_steps(kernels):
    rows = StepRows(SeriesTable())
    for _ in range(40):
        tensors = {i: torch.randn(9).to("npu") for i in range(6)}
        rows.add_many(list(tensors), list(tensors.values()))
        assert_rows(resolved(rows), tensors)
    (device,) = rows._devices.values()
    assert len(kernels.launches) == 80
    assert device.fused.tables.pinned.allocations <= 2 * MOST_BUFFERS  # the simulated device is some copies behind


def test_a_training_pins_no_further_tables_and_asks_for_streams_a_few_times_a_step(kernels, out, monkeypatch):
    """Everything at every step: what the launches need is the same from the third step on."""
    model, optimizer = on_device.make("npu", mlp)
    asked = []
    current_stream = type(NPU).current_stream
    monkeypatch.setattr(type(NPU), "current_stream", lambda *args: (asked.append(1), current_stream(*args))[1])
    with trainsentry.TrainMonitor(on_device.everything(out, detect=False)).watch(model, optimizer) as monitor:
        on_device.train(model, optimizer, on_device.batches(model, 4, "npu"))
        (device,) = monitor._loop.watch.rows._devices.values()
        pinned, before = device.fused.tables.pinned, device.fused.tables.pinned.allocations
        asked.clear()
        kernels.launches.clear()
        on_device.train(model, optimizer, on_device.batches(model, 4, "npu"))
        tensors = len(monitor.records(last=1))
    assert pinned.allocations - before <= 1  # the simulated device may fall some copies behind once more
    assert pinned.allocations <= MOST_BUFFERS
    assert tensors > 30
    assert len(kernels.launches) / 4 <= tensors / 64 + 12
    assert len(asked) <= 4 * len(kernels.launches)


class InPlace(nn.Module):
    """Changes tensors in place by modules, operators, views, functions and assignments."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x, scale):
        h = self.relu(self.bn(self.conv(x))).mean((2, 3))
        h += 1
        h.mul_(scale)
        self.count.copy_(h.detach().mean(0))
        y = self.first(h + self.count)
        y.view(-1)[1:3].add_(1)
        F.relu(y, inplace=True)
        z = self.second(y) - self.count.sum()
        z[0] = 0
        torch.clamp(z, min=-1, out=None)
        return {"z": z, "rest": [z.argmax(1), z > 0, 3]}


def dumped(folder, device, task, level, *, may_wait=True):
    torch.manual_seed(0)
    model = InPlace().to(device)
    torch.manual_seed(1)
    x, scale = torch.randn(2, 3, 6, 6).to(device), torch.tensor(1.5).to(device)
    debugger = PrecisionDebugger(task=task, level=level, dump_path=str(folder))
    debugger.start(model)
    if not may_wait:
        torch.npu.set_sync_debug_mode("error")
    model(x, scale)["z"].sum().backward()
    if not may_wait:
        torch.npu.set_sync_debug_mode("default")
    debugger.stop()
    debugger.step()
    assert debugger._session.guard.failures == {}
    debugger.close()
    PrecisionDebugger.close()
    return folder / "step0" / "rank0"


def described(value):
    """Return the descriptions of tensors in an entry, in order."""
    if isinstance(value, dict):
        return [value] if "Max" in value else [found for item in value.values() for found in described(item)]
    return [found for item in value for found in described(item)] if isinstance(value, list) else []


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_a_dump_on_a_device_says_what_a_dump_on_the_host_says(tmp_path, task, level, caplog):
    """The model works in place here and there: on modules, on views, and by operators."""
    folders = [dumped(tmp_path / device, device, task, level) for device in ("cpu", "npu")]
    host, device = (json.loads((folder / "dump.json").read_text())["data"] for folder in folders)
    assert list(host) == list(device)
    compared = 0
    for name, entry in host.items():
        for one, other in zip(described(entry), described(device[name]), strict=True):
            assert (one["dtype"], one["shape"]) == (other["dtype"], other["shape"])
            for key in ("Max", "Min", "Mean", "Norm"):
                close = one[key] if one[key] is None else pytest.approx(one[key], rel=2e-4, abs=1e-5)
                assert other[key] == close, (name, key)
            if "data_name" in one:
                on_host = load_tensor(folders[0] / "dump_tensor_data" / one["data_name"])
                on_npu = load_tensor(folders[1] / "dump_tensor_data" / other["data_name"])
                assert torch.allclose(on_host.double(), on_npu.double(), rtol=1e-4, atol=1e-5), name
            compared += 1
    assert compared > 20
    assert "changed before" not in caplog.text


@pytest.mark.parametrize(("level", "most"), [("L0", 16), ("L1", 20), ("mix", 20)])
def test_statistics_wait_for_the_device_at_the_end_alone_and_take_few_launches(tmp_path, kernels, level, most):
    folder = dumped(tmp_path, "npu", "statistics", level, may_wait=False)
    tensors = sum(len(described(entry)) for entry in json.loads((folder / "dump.json").read_text())["data"].values())
    assert tensors > 2 * most or level == "L0"
    assert kernels.launches.count("combine_rows") == 1
    assert kernels.launches.count("partial_rows") <= most


def attended(folder, device):
    """Dump what attention does with the heads of a sequence: none of them lies in the order of its axes."""
    torch.manual_seed(2)
    heads = torch.randn(2, 6, 3, 4, 5).to(device)
    debugger = PrecisionDebugger(task="statistics", level="L1", dump_path=str(folder))
    debugger.start()
    for block in heads.permute(0, 3, 2, 1, 4):
        queries, keys, values = block.unbind(1)
        (queries.matmul(keys.transpose(1, 2))[:, :, ::2] + 1).matmul(values[:, ::2])
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    return json.loads((folder / "step0" / "rank0" / "dump.json").read_text())["data"]


def test_a_dump_reads_tensors_that_are_not_contiguous_with_the_others(tmp_path, kernels):
    on_host, on_npu = attended(tmp_path / "cpu", "cpu"), attended(tmp_path / "npu", "npu")
    pairs = list(zip(described(list(on_host.values())), described(list(on_npu.values())), strict=True))
    assert len(pairs) > 20
    for host, device in pairs:
        for key in ("Max", "Min", "Mean", "Norm"):
            assert device[key] == pytest.approx(host[key], rel=2e-4, abs=1e-5)
    assert kernels.launches.count("partial_rows") == 1


class Layers(nn.Module):
    """Modules of torch's own, with what a program may do to a tensor between them, or in a hook."""

    def __init__(self, disturbed=None):
        super().__init__()
        self.first, self.norm, self.gelu, self.second = nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)
        self.disturbed = disturbed
        if disturbed == "a hook":
            self.gelu.register_forward_pre_hook(lambda _, args: (args[0].mul_(2.0),))

    def forward(self, x):
        x = self.first(x)
        if self.disturbed == "between":
            x.mul_(2.0)
        return self.second(self.gelu(self.norm(x)))


def layered(folder, device, disturbed=None):
    """Return the descriptions of a dump of L0, of passes forward and backward."""
    torch.manual_seed(0)
    model = Layers(disturbed).to(device)
    debugger = PrecisionDebugger(task="statistics", level="L0", dump_path=str(folder))
    debugger.start(model)
    model(torch.ones(3, 4).to(device)).sum().backward()
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    return described(list(json.loads((folder / "step0" / "rank0" / "dump.json").read_text())["data"].values()))


@pytest.mark.parametrize("disturbed", [None, "between", "a hook"])
def test_a_module_that_only_computes_needs_no_read_before_its_call(tmp_path, kernels, disturbed, caplog):
    host, device = layered(tmp_path / "cpu", "cpu", disturbed), layered(tmp_path / "npu", "npu", disturbed)
    assert len(host) == len(device) > 20
    for one, other in zip(host, device, strict=True):
        for key in ("Max", "Min", "Mean", "Norm"):
            assert other[key] == pytest.approx(one[key], rel=2e-4, abs=1e-5)
    assert "changed before" not in caplog.text
    of_each_module_and_the_backward_pass = 5
    before_the_hook = int(disturbed == "a hook")
    assert kernels.launches.count("partial_rows") == of_each_module_and_the_backward_pass + before_the_hook


def test_files_are_written_while_the_step_goes_on(tmp_path):
    dumped(tmp_path, "npu", "tensor", "mix", may_wait=False)


class Broken:
    """A kernel whose launch fails, as with a driver that is too old, or without memory."""

    def __init__(self, error):
        self.error = error

    def __getitem__(self, grid):
        raise self.error


@pytest.mark.parametrize("kernel", ["partial_rows", "combine_rows"])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("the driver is too old"), torch.OutOfMemoryError("out of memory"), ImportError("no compiler")],
    ids=["old driver", "out of memory", "no compiler"],
)
def test_kernels_that_fail_change_no_bit_of_the_training_and_are_told_of_once(
    kernels, kernel, error, out, monkeypatch, caplog
):
    bare = on_device.bare("npu", 4, mlp)
    monkeypatch.setattr(type(kernels), kernel, Broken(error))
    with caplog.at_level("WARNING", "trainsentry"):
        losses, state, records, _ = on_device.watched(out, "npu", 4, mlp, strict=False)
    assert losses == bare[0]
    assert all(torch.equal(state[name], value) for name, value in bare[1].items())
    assert sum(str(error) in r.getMessage() for r in caplog.records) == 1
    if not isinstance(error, torch.OutOfMemoryError):  # the slower operations need more memory, not less
        assert set(records[records.quantity == "gradient"].step) >= {1, 2, 3}
