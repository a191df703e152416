"""Copies between a device and pinned host memory, which neither the host nor the device waits for."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class HostCopy:
    """A copy of a device tensor on its way to pinned host memory.

    `event` follows the copy on the device's stream; it is None where the values are in host memory already. Reading
    before the copy has arrived gives whatever the memory held.
    """

    def __init__(self, host: Tensor, event: Any = None) -> None:
        self.host = host
        self.event = event

    def has_arrived(self) -> bool:
        """Whether the values are in host memory; does not wait."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Wait until the values are in host memory."""
        if self.event is not None:
            self.event.synchronize()

    def array(self) -> npt.NDArray[Any]:
        """Return the values as an array that shares the pinned memory; call it once the copy has arrived."""
        return self.host.numpy()


def pinned_copy_to_host(x: Tensor, into: Tensor | None = None) -> HostCopy:
    """Start copying `x` into pinned memory on its device's current stream; return at once.

    `into` is a pinned tensor of the same shape and dtype to reuse. The device must be current.

    Raises:
        RuntimeError: when no memory can be pinned.

    """
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True) if into is None else into
    host.copy_(x, non_blocking=True)
    event = torch.Event(x.device)
    event.record()
    return HostCopy(host, event)


def pinned_copy_to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Start copying a NumPy array to a device through pinned memory; return the device's tensor at once.

    The array may be changed afterwards. The pinned memory returns to torch's cache once the device has read it.
    """
    return torch.from_numpy(np.ascontiguousarray(values)).pin_memory().to(device, non_blocking=True)
