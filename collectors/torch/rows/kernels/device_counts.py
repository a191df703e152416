"""Keeps the counters of a step's histograms on an accelerator; where no kernel of ours runs, plain operations count."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trainsentry.collectors.histogram import MIDDLE, MOST_ELEMENTS, SLOTS
from trainsentry.collectors.torch.device.registry import device_of

PIECE: Final = 1 << 22
"""Elements that plain operations count at a time: their temporaries take some 100 MB."""

_OTHERS: Final = SLOTS - 1


@dataclass(frozen=True, slots=True)
class KernelCounters:
    """What the fused kernels need to count: counters, int32 of shape (rows, SLOTS), and a divisor of one element."""

    table: Tensor
    divisor: Tensor


class DeviceCounts:
    """The counters of one device's rows in one buffer of 2 kB a row; `table` is int32 of shape (rows, SLOTS)."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device = device
        self.table = torch.zeros(rows, SLOTS, dtype=torch.int32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._slots = torch.arange(SLOTS, dtype=torch.int32, device=device)

    def for_kernels(self, sizes: Sequence[int], divisor: Tensor | None) -> KernelCounters | None:
        """Return what the kernels need for tensors of these sizes, None where one is too large to be counted."""
        if max(sizes, default=0) > MOST_ELEMENTS:
            return None
        return KernelCounters(self.table, self._one if divisor is None else self._divisor(divisor))

    def count(self, row: int, x: Tensor, divisor: Tensor | None, implicit_zeros: int = 0) -> None:
        """Add the values of `x` to a row's counters by sorting them, which neither waits nor branches on a value."""
        if x.numel() + implicit_zeros > MOST_ELEMENTS:
            return
        with torch.no_grad():
            flat = x.detach().reshape(-1)
            for start in range(0, flat.numel(), PIECE):
                self.table[row] += self._counted(flat[start : start + PIECE], divisor)
            if implicit_zeros:
                self.table[row, MIDDLE] += implicit_zeros

    def clear(self, start: int, stop: int) -> None:
        """Set the counters of some rows to 0."""
        self.table[start:stop].zero_()

    def grow(self, rows: int) -> None:
        """Make room for more rows."""
        grown = torch.zeros(rows, SLOTS, dtype=torch.int32, device=self.device)
        grown[: len(self.table)].copy_(self.table)
        seam = device_of(self.device)
        seam.keep_for_stream([self.table], seam.current_stream(self.device))
        self.table = grown

    def _divisor(self, divisor: Tensor) -> Tensor:
        return divisor.to(self.device, torch.float32).reshape(())

    def _counted(self, piece: Tensor, divisor: Tensor | None) -> Tensor:
        if piece.is_complex():
            piece = piece.to(device_of(piece).wide_dtype(piece.dtype)).abs()
        single = torch.finfo(torch.float32)
        values = piece.to(device_of(piece).row_dtype) if piece.dtype is torch.float64 else piece.float()
        if divisor is not None:
            values = values / self._divisor(divisor)
        if divisor is not None or piece.dtype is torch.float64:
            values = torch.where(values.isfinite(), values.clamp(single.min, single.max), values).float()
        slots = _slots_of(values.resolve_neg().contiguous().view(torch.int32)).sort().values
        ends = torch.searchsorted(slots, self._slots, right=True, out_int32=True)
        return torch.diff(ends, prepend=ends.new_zeros(1))


def _slots_of(bits: Tensor) -> Tensor:
    """Return the slot of each float32 whose bits are given; see `collectors/histogram.py`."""
    key = (bits >> 21) & 1023
    octave = key >> 2
    number = torch.where(octave >= 103, key - 331, (octave - 22).clamp(min=0))
    number = torch.where(octave >= 143, (octave + 98).clamp(max=MIDDLE), number)
    slots = torch.where(bits < 0, MIDDLE - number, MIDDLE + number)
    return slots.masked_fill(key >= 1020, _OTHERS)
