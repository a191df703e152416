"""The demo trains on the device that was chosen; a device that is not there is an error that names what is."""

import pytest
import torch

from trainsentry.collectors.torch.device.device import Device
from trainsentry.monitor.demo import device
from trainsentry.monitor.demo.device import training_device


@pytest.fixture
def accelerators(monkeypatch):
    """Have torch find `count` accelerators of a kind; the test machine's own do not matter."""

    def find(kind, count):
        found = Device(kind)
        monkeypatch.setattr(found, "devices", lambda: [torch.device(kind, i) for i in range(count)])
        monkeypatch.setattr(device, "accelerator", lambda: found if count else None)

    return find


def test_auto_takes_the_accelerator_that_torch_finds_and_else_the_cpu(accelerators):
    accelerators("cuda", 0)
    assert training_device("auto").type == "cpu"
    for kind in ("cuda", "xpu"):
        accelerators(kind, 1)
        assert training_device("auto").type == kind
        assert training_device("cpu").type == "cpu"


def test_several_ranks_stay_on_the_cpu_unless_a_device_is_chosen(accelerators):
    accelerators("cuda", 2)
    assert training_device("auto", ranks=2).type == "cpu"
    assert training_device("cuda", ranks=2).type == "cuda"


@pytest.mark.parametrize(
    ("kind", "count", "choice", "told"),
    [
        ("cuda", 0, "cuda", "no cuda; allowed here: auto, cpu$"),
        ("cuda", 1, "npu", "no npu; allowed here: auto, cpu, cuda$"),
        ("xpu", 1, "cuda", "no cuda; allowed here: auto, cpu$"),
    ],
)
def test_a_device_that_is_not_there_is_an_error_that_names_what_is(accelerators, kind, count, choice, told):
    accelerators(kind, count)
    with pytest.raises(ValueError, match=told):
        training_device(choice, choices=["auto", "cpu", "cuda", "npu"])


def test_more_ranks_than_devices_are_an_error_that_counts_both(accelerators):
    accelerators("cuda", 2)
    with pytest.raises(ValueError, match="3 ranks need as many devices, this machine has 2"):
        training_device("cuda", ranks=3)
