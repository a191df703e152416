"""Each type of device is one object, found by a tensor, a device or a name; others can be added."""

import numpy as np
import pytest
import torch

from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.device.cuda import CUDA
from trainsentry.collectors.torch.device.device import Device
from trainsentry.collectors.torch.device.npu import NPU
from trainsentry.collectors.torch.device.registry import (
    available_devices,
    device_of,
    known_devices,
    register_device,
    stream_is_captured,
    unregister_device,
)

HOST = torch.device("cpu")


def test_a_device_is_found_by_a_tensor_a_device_and_a_name():
    assert device_of(torch.ones(1)) is device_of(HOST) is device_of("cpu") is CPU
    assert device_of(torch.device("cuda", 3)) is device_of("cuda:1") is CUDA
    assert device_of("npu:0") is NPU
    assert known_devices()[0] is available_devices()[0] is CPU


@pytest.mark.parametrize(("name", "has_float64"), [("mps", False), ("xpu", True)])
def test_a_type_that_nobody_registered_is_as_torch_describes_all(name, has_float64):
    device = device_of(name)
    assert (device.type, device.has_float64, device.on_host) == (name, has_float64, False)
    assert device_of(name) is device
    if not device.is_available():
        assert (device.devices(), device.rng_states(), device.is_capturing()) == ([], [], False)


def test_a_type_can_be_added_once_and_taken_away():
    mine = Device("mtia", has_float64=False)
    register_device(mine)
    try:
        assert device_of(torch.device("mtia", 1)) is mine
        with pytest.raises(ValueError, match="'mtia' is registered; allowed: any type except cpu, cuda, npu"):
            register_device(Device("mtia"))
    finally:
        unregister_device(mine)
    assert device_of("mtia") is not mine
    unregister_device(device_of("mtia"))


def test_the_host_copies_at_once():
    x = torch.arange(4.0)
    copy = CPU.copy_to_host(x)
    x += 1
    assert copy.has_arrived()
    copy.wait()
    assert copy.array().tolist() == [0.0, 1.0, 2.0, 3.0]
    into = torch.empty(4)
    assert CPU.copy_to_host(x, into).host is into
    assert into.tolist() == x.tolist()
    values = np.ones(2)
    moved = CPU.copy_to_device(values, HOST)
    values[:] = 7
    assert moved.tolist() == [1.0, 1.0]


def test_the_host_has_no_streams_captures_or_flags_and_sums_in_float64():
    assert CPU.current_stream(HOST) is None
    assert CPU.follow(None, HOST) is None
    assert not stream_is_captured()
    assert CPU.overflow_flag() is None
    assert CPU.faults() == {}
    assert CPU.row_dtype is torch.float64
    assert CPU.wide_dtype(torch.complex64) is torch.complex128
    assert CPU.wide_dtype(torch.bfloat16) is torch.float64
    x = torch.ones(2)
    assert CPU.in_plain_format(x) is x
    with CPU.guard(HOST):
        CPU.synchronize(HOST)


def test_random_states_of_the_host_come_back():
    states = CPU.rng_states()
    drawn = torch.rand(3)
    CPU.restore_rng_states(states)
    assert torch.equal(torch.rand(3), drawn)


def test_what_the_host_says_of_itself():
    found = CPU.properties(HOST)
    assert found.processors >= 1
    assert found.memory_bytes > CPU.memory(HOST).free > 2**20
