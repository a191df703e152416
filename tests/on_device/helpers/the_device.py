"""The device under test: `TRAINSENTRY_TEST_DEVICE` is `auto` (torch's accelerator) or a name such as `cuda:1` or `cpu`.

With `cpu` the suite checks itself where there is no accelerator; what the CPU does not have is skipped.
"""

import os

import pytest
import torch

CHOICE = os.environ.get("TRAINSENTRY_TEST_DEVICE", "")


def find():
    """Return the device under test; None when there is none."""
    if CHOICE not in {"", "auto"}:
        return torch.device(CHOICE)
    found = torch.accelerator.is_available() if CHOICE else False
    return torch.accelerator.current_accelerator() if found else None


DEVICE = find()
MODULE = torch.get_device_module(DEVICE) if DEVICE is not None else None
NOTHING_TO_TEST = "torch finds no accelerator here" if CHOICE else "`make test-device` runs it on an accelerator"
ON_CPU = DEVICE is not None and DEVICE.type == "cpu"

HAS_FLOAT64 = DEVICE is not None and DEVICE.type in {"cpu", "cuda"}
RELATIVE = 1e-12 if HAS_FLOAT64 else 1e-5
"""Largest relative error of a statistic: its sums are float64 where the device has that."""

needs_an_accelerator = pytest.mark.skipif(ON_CPU, reason="needs an accelerator")


def needs(name):
    """Skip a test where the device's module has no such function or class."""
    has = DEVICE is not None and not ON_CPU and hasattr(MODULE, name)
    return pytest.mark.skipif(not has, reason=f"this device has no {name}")


def synchronize():
    """Wait until the device has done everything."""
    MODULE.synchronize()
