"""Checks calls with torch, on one device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainsentry.collectors.calls.call_check import RECORDED
from trainsentry.collectors.calls.rebuilt_values import TensorSource
from trainsentry.collectors.torch.accuracy.checked_call import TorchCall
from trainsentry.collectors.torch.device.registry import accelerator, device_of


class TorchChecks:
    """Runs calls on a device: "cpu", "cuda:1", or a number of torch's accelerator (the CPU where there is none).

    With the device RECORDED a call runs in the better precision alone, beside the results that `folder` holds.

    `folder` holds the dumped tensors; None draws random ones from `seed`. One thread computes, so that the results do
    not depend on how many processes share the work.

    Raises:
        ValueError: for a device that torch does not have.

    """

    def __init__(self, device: str, folder: Path | None, seed: int) -> None:
        self.device = None if device == RECORDED else _device(device)
        self._source = TensorSource(folder, seed)
        torch.set_num_threads(1)

    def check(self, call: str, forward: Mapping[str, Any], backward: Mapping[str, Any] | None) -> TorchCall:
        """Run a call on both sides; see `collectors.calls.call_check.CallChecks`."""
        return TorchCall(call, forward, backward, self._source, self.device)


def _device(name: str) -> torch.device:
    found = accelerator()
    try:
        device = torch.device(f"{found.type if found else 'cpu'}:{name}" if name.isdigit() else name)
        on_host = device_of(device).on_host
        torch.zeros(1, device="cpu" if on_host else device)
    except (RuntimeError, AssertionError) as error:
        text = (str(error).splitlines() or [""])[0]
        raise ValueError(f"--devices: {name!r}: {text}") from None
    return torch.device("cpu") if on_host else device
