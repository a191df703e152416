"""The device under test computes; without one, this is the folder's one test, and it is skipped."""

import pytest
import torch
from the_device import DEVICE, NOTHING_TO_TEST

from trainsentry.collectors.torch.environment import describe_environment


def test_the_device_computes_and_runs_are_described_by_it():
    if DEVICE is None:
        pytest.skip(NOTHING_TO_TEST)
    assert torch.arange(5, device=DEVICE).sum().item() == 10
    assert describe_environment()["accelerator"].startswith(DEVICE.type) or DEVICE.type == "cpu"
