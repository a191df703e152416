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
from trainsentry.collectors.torch.device.npu import NPU


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


def checked(tmp_path, body, nums=-1):
    path = tmp_path / "config.json"
    settings = {"task": "overflow_check", "level": "L1", "overflow_check": {"overflow_nums": nums}}
    path.write_text(json.dumps({"dump_path": str(tmp_path / "dump"), **settings}))
    debugger = PrecisionDebugger(str(path))
    debugger.start(None)
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
