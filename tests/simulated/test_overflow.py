"""Overflow is found in INF/NAN mode by the values, and in saturation mode by the flag and the largest values."""

import json

import debugged
import on_device
import pytest
import simulated_npu
import torch
from torch import nn

import trainsentry
from trainsentry import OverflowLimitReached, PrecisionDebugger
from trainsentry.collectors.statistics import INFS, NANS
from trainsentry.collectors.torch.device.npu import NPU
from trainsentry.collectors.torch.rows.list_statistics import ListStatistics


class Half(nn.Module):
    """A model in float16 whose middle overflows when its input is large."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last((self.first(x) * 30_000.0) * 1e-4)


def half():
    torch.manual_seed(0)
    model = Half().to("npu").half()
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def half_steps(model, optimizer, scales):
    """Train a step on inputs of each scale; those of a thousand overflow in the model's middle."""
    for scale in scales:
        loss = model(torch.full((4, 8), scale, dtype=torch.float16, device="npu")).float().square().mean()
        (loss * 1e-6).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(params=["INF/NAN", "saturation"])
def mode(request):
    if request.param == "INF/NAN":
        yield request.param
        return
    with simulated_npu.saturating():
        yield request.param


def test_the_mode_is_recognised(mode):
    flag = NPU.overflow_flag()
    if mode == "INF/NAN":
        assert flag is None
        return
    assert not flag.is_set()
    large = torch.full((2,), 60000.0, dtype=torch.float16, device="npu")
    assert (large * 2).tolist() == [65504.0, 65504.0]
    assert flag.is_set()
    flag.clear()
    assert not flag.is_set()


def checked(tmp_path, body, nums=-1, level="L1", model=None):
    path = tmp_path / "config.json"
    settings = {"task": "overflow_check", "level": level, "overflow_check": {"overflow_nums": nums}}
    path.write_text(json.dumps({"dump_path": str(tmp_path / "dump"), **settings}))
    debugger = PrecisionDebugger(str(path))
    debugger.start(model)
    body()
    debugger.stop()
    debugger.step()
    assert debugger._session.guard.failures == {}
    return debugged.read(tmp_path / "dump" / "step0" / "rank0")["dump"]["data"]


def overflowing():
    x = torch.full((2,), 60000.0, dtype=torch.float16, device="npu")
    x * 2
    x * 0.5


def test_the_call_that_overflows_is_found_and_no_other(tmp_path, mode):
    data = checked(tmp_path, overflowing)
    assert {name: entry["overflow"] for name, entry in data.items()} == {"Tensor.__mul__.0.forward": "made"}


def test_an_overflow_before_the_check_is_not_blamed_on_its_first_call(tmp_path, mode):
    large = torch.full((2,), 60000.0, dtype=torch.float16, device="npu")
    large * 2
    x = torch.ones(2, device="npu")
    assert checked(tmp_path, lambda: x + 1) == {}


class Doubled(torch.autograd.Function):
    """Its backward pass overflows in the middle, and its result is small again."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 60_000.0 * 60_000.0 * 1e-6


def test_a_backward_pass_that_overflows_is_found_and_no_other(tmp_path, mode):
    class Inner(nn.Module):
        def forward(self, x):
            return Doubled.apply(x)

    model = nn.Sequential(nn.Linear(2, 2), Inner(), nn.Linear(2, 2)).to("npu").half()
    x = torch.ones(3, 2, dtype=torch.float16, device="npu")
    data = checked(tmp_path, lambda: (model(x) * 0.5).sum().backward(), level="mix", model=model)
    backward = [name for name in data if ".backward" in name]
    assert [name for name in data if ".forward" in name] == []
    if mode == "saturation":
        assert backward[0] == "Module.1.Inner.backward.0"
        assert set(backward) <= {"Module.1.Inner.backward.0", "Module.root.Sequential.backward.0"}
    else:  # Inf goes on to the weights below
        assert "Module.1.Inner.backward.0" in backward
    assert data["Module.1.Inner.backward.0"]["overflow"] == "made"


@pytest.mark.parametrize("when", ["before", "inside", "never"])
def test_the_flag_that_a_loss_scaler_reads_is_as_if_nothing_had_been_checked(tmp_path, when):
    with simulated_npu.saturating():
        x = torch.ones(2, device="npu")
        if when == "before":
            overflowing()
        checked(tmp_path, overflowing if when == "inside" else lambda: x + 1)
        assert NPU.overflow_flag().is_set() is (when != "never")


def test_the_limit_of_calls_stops(tmp_path, mode):
    with pytest.raises(OverflowLimitReached):
        checked(tmp_path, overflowing, nums=1)


@pytest.mark.parametrize("nums", [1, 3])
def test_overflow_nums_stops_the_monitored_run(out, mode, nums):
    model, optimizer = half()
    config = on_device.everything(out, overflow_check={"overflow_nums": nums}, on_incident=False, detect=False)
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        with pytest.raises(OverflowLimitReached) as stopped:
            half_steps(model, optimizer, [1e-2] * 5 + [1e3] * 15)
        assert monitor._loop.overflow.count == nums
    assert 5 + nums - 1 <= stopped.value.step <= 5 + nums + 1


def test_a_healthy_run_in_either_mode_counts_none(out, mode):
    model, optimizer = half()
    config = on_device.everything(out, overflow_check={"overflow_nums": 1}, on_incident=False)
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        half_steps(model, optimizer, [1e-2] * 4)
        monitor.flush()
        assert monitor._loop.overflow.count == 0
        assert monitor.incidents == ()


def test_reading_statistics_together_sets_no_flag_and_they_are_true(no_waiting):
    """A mask may hold the smallest value of its dtype, so that its norm is beyond the largest."""
    masks = [torch.full((3000,), torch.finfo(dtype).min, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    tensors = [*masks, torch.empty(0), torch.zeros(3), torch.tensor([65504.0, -1.0]).half(), torch.randn(4000)]
    with simulated_npu.saturating():
        statistics = ListStatistics(torch.device("npu", 0))
        copy = NPU.copy_to_host(statistics.rows_of([x.to("npu:0") for x in tensors]))
        copy.wait()
        assert not torch.ops.simulated_npu.overflow_seen()
    for x, row in zip(tensors, copy.array().tolist(), strict=True):
        if x.numel():
            want = [x.double().min(), x.double().max(), x.double().mean(), x.double().norm().clamp(max=3.4028235e38)]
            assert row[:4] == pytest.approx([float(one) for one in want], rel=1e-5, abs=1e-6)
        assert row[NANS : INFS + 1] == [0.0, 0.0]
