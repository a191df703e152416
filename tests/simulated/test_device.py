"""The simulated NPU differs from the CPU where a device does: a test on it would notice."""

import subprocess
import sys

import pytest
import simulated_npu
import torch

from trainsentry.collectors.torch.device.npu import NPU
from trainsentry.collectors.torch.device.registry import accelerator, available_devices


def test_it_is_torchs_accelerator_and_the_seams_npu():
    assert accelerator() is NPU
    assert [device.type for device in available_devices()] == ["cpu", "npu"]
    assert NPU.devices() == [torch.device("npu", 0), torch.device("npu", 1)]
    assert NPU.properties(torch.device("npu")).name == "Simulated"


def test_a_copy_to_the_host_arrives_when_its_event_is_waited_for():
    copy = NPU.copy_to_host(torch.full((3,), 5.0, device="npu"))
    assert torch.isnan(copy.host).all()
    assert not copy.has_arrived()
    copy.wait()
    assert copy.array().tolist() == [5.0, 5.0, 5.0]
    assert copy.has_arrived()


def test_an_event_that_is_asked_often_enough_has_come():
    copy = NPU.copy_to_host(torch.ones(2, device="npu"))
    asked = [copy.has_arrived() for _ in range(5)]
    assert asked[0] is False
    assert asked[-1] is True
    assert copy.array().tolist() == [1.0, 1.0]


def test_pinned_memory_is_reused_and_values_go_the_other_way_too():
    into = torch.empty(2, pin_memory=True)
    before = simulated_npu.counter("pinned allocations")
    copy = NPU.copy_to_host(torch.tensor([1.0, 2.0], device="npu"), into)
    copy.wait()
    assert simulated_npu.counter("pinned allocations") == before
    assert copy.host is into
    moved = NPU.copy_to_device(copy.array() * 2, torch.device("npu", 1))
    assert (moved.device, moved.tolist()) == (torch.device("npu", 1), [2.0, 4.0])


def test_float64_becomes_float32_without_a_word():
    assert torch.ones(2, dtype=torch.float64, device="npu").dtype is torch.float32
    assert torch.ones(2, device="npu").double().dtype is torch.float32
    assert NPU.row_dtype is torch.float32
    assert NPU.wide_dtype(torch.complex64) is torch.complex64


def test_an_address_of_the_device_cannot_be_read_by_the_host():
    script = (
        "import sys, ctypes; sys.path[:0] = sys.argv[1:]; import simulated_npu; simulated_npu.load(); import torch; "
        "x = torch.ones(4, device='npu'); x.cpu(); print('still here', flush=True); "
        "ctypes.string_at(x.data_ptr(), 4)"
    )
    ran = subprocess.run([sys.executable, "-c", script, *sys.path], capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("still here\n", -11)


def test_waiting_for_it_can_be_an_error(no_waiting):
    x = torch.ones(2, device="npu")
    for wait in (x.sum().item, x.cpu, x.nonzero, torch.npu.synchronize):
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait()
    NPU.copy_to_host(x).wait()


def test_its_random_numbers_are_its_own():
    NPU.seed(7)
    states, host = NPU.rng_states(), torch.get_rng_state()
    assert len(states) == 2
    drawn = torch.rand(3, device="npu")
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(torch.rand(3, device="npu"), drawn)
    NPU.restore_rng_states(states)
    assert torch.equal(torch.rand(3, device="npu"), drawn)


def test_a_private_format_is_read_in_the_plain_one():
    import torch_npu

    x = torch.arange(6.0, device="npu").reshape(2, 3)
    private = torch_npu.npu_format_cast(x, 29)
    assert NPU.has_plain_format(x)
    assert not NPU.has_plain_format(private)
    assert NPU.in_plain_format(x) is x
    assert NPU.in_plain_format(private).tolist() == x.tolist()
    assert int(torch_npu.get_npu_format(private)) == 29


def test_streams_and_devices_are_followed():
    here = NPU.current_stream(torch.device("npu", 0))
    before = simulated_npu.counter("stream waits")
    with torch.npu.stream(torch.npu.Stream()):
        other = NPU.follow(here, torch.device("npu", 0))
        assert other != here
        assert simulated_npu.counter("stream waits") == before + 1
        assert NPU.follow(other, torch.device("npu", 0)) == other
        assert simulated_npu.counter("stream waits") == before + 1
    with NPU.guard(torch.device("npu", 1)):
        assert torch.empty(1, device="npu").device.index == 1
    assert torch.empty(1, device="npu").device.index == 0


def test_memory_is_counted():
    before = NPU.memory(torch.device("npu", 0))
    kept = torch.empty(1000, device="npu")
    after = NPU.memory(torch.device("npu", 0))
    assert after.allocated - before.allocated == kept.nbytes
    assert after.peak >= after.allocated
    assert before.free - after.free == kept.nbytes
