"""Sends tables of numbers to a device by way of pinned memory that is used again."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.torch.device.registry import device_of

FIRST_NUMBERS: Final = 1_024
"""Numbers of a buffer at first (8 kB); buffers grow by doubling."""

MOST_BUFFERS: Final = 8
"""Pinned buffers kept: a step makes a few launches, and the host may run a step ahead of the device."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Pinned memory, its bytes, and the event after which it may be written again."""

    pinned: Tensor
    numbers: npt.NDArray[np.int64]
    memory: memoryview
    copied: Any


class PinnedTables:
    """Copies tables of int64 to one buffer on a device; a table is valid until the next one of its stream.

    A pinned buffer is written again once its last copy is complete, so a step in the usual rhythm allocates nothing;
    `allocations` counts the buffers that were made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seam = device_of(device)
        self.allocations = 0
        self._buffers: list[_Buffer] = []
        self._on_device: Tensor | None = None

    def send(self, parts: Sequence[npt.NDArray[np.int64]], into: Tensor | None = None) -> Tensor:
        """Start to copy the concatenated parts; return the table, int64 of shape (n,), on the device.

        It lies at `into` where that is given, and stays valid then.
        """
        if self.seam.on_host:
            table = torch.from_numpy(np.concatenate(parts))
            return table if into is None else into.copy_(table)
        count = sum(map(len, parts))
        buffer = self._free_buffer(count)
        np.concatenate(parts, out=buffer.numbers[:count])
        table = self._table(count) if into is None else into
        table.copy_(buffer.pinned[:count], non_blocking=True)
        buffer.copied.record()
        return table

    def renew(self, table: Tensor, memory: memoryview | None, numbers: Sequence[int]) -> None:
        """Start to write numbers over a table, int64 of shape (n,); `memory` are its bytes where the host has them.

        Neither NumPy nor torch is called where that can be avoided: for few numbers a first call of theirs in a while,
        whose code no cache holds, takes longer than all else.
        """
        if memory is not None:
            memory[:] = array("q", numbers)
            return
        buffer = self._free_buffer(len(numbers))
        buffer.memory[: len(numbers)] = array("q", numbers)
        table.copy_(buffer.pinned[: len(numbers)], non_blocking=True)
        buffer.copied.record()

    def _free_buffer(self, count: int) -> _Buffer:
        for buffer in self._buffers:
            if len(buffer.numbers) >= count and buffer.copied.query():
                return buffer
        if len(self._buffers) == MOST_BUFFERS:  # torch keeps the memory of one that is dropped until its copy is done
            del self._buffers[0]
        pinned = torch.empty(_rounded(count), dtype=torch.int64, device="cpu", pin_memory=True)
        self.allocations += 1
        buffer = _Buffer(pinned, pinned.numpy(), memory_of(pinned), torch.Event(self.device))
        self._buffers.append(buffer)
        return buffer

    def _table(self, count: int) -> Tensor:
        if self._on_device is None or self._on_device.numel() < count:
            if self._on_device is not None:
                self.seam.keep_for_stream([self._on_device], self.seam.current_stream(self.device))
            self._on_device = torch.empty(_rounded(count), dtype=torch.int64, device=self.device)
        return self._on_device[:count]


def memory_of(table: Tensor) -> memoryview:
    """Return the memory of an int64 tensor of shape (n,) on the host, of format "q"."""
    return table.numpy().data.cast("B").cast("q")


def _rounded(count: int) -> int:
    """Return the size of a buffer for a table.

    >>> _rounded(5), _rounded(3000)
    (1024, 4096)
    """
    return max(FIRST_NUMBERS, 1 << (count - 1).bit_length())
