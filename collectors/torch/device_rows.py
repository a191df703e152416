"""Rows that lie on an accelerator until the step ends: written there, copied to the host once."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.statistics import COLUMNS, NORM, VALUE
from trainsentry.collectors.torch.device_statistics import device_row, row_dtype

FIRST_ROWS: Final = 256
"""Rows of the first buffer: 16 kB; it doubles when a step has more."""


class DeviceRows:
    """Rows of one device in one buffer, in the order in which they were added."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = row_dtype(device)
        self.positions: list[int] = []
        self._rows = torch.empty(FIRST_ROWS, COLUMNS, dtype=self.dtype, device=device)

    def reserve(self, positions: Sequence[int]) -> Tensor:
        """Take the next rows for the given positions of the record; return them, shape (n, COLUMNS)."""
        start = len(self.positions)
        self.positions += positions
        while len(self.positions) > len(self._rows):
            grown = torch.empty(2 * len(self._rows), COLUMNS, dtype=self.dtype, device=self.device)
            grown[:start].copy_(self._rows[:start])
            self._rows = grown
        return self._rows[start : len(self.positions)]

    def add(self, position: int, x: Tensor, eps: float, implicit_zeros: int = 0) -> Tensor:
        """Write the statistics of `x` to the next row; return it."""
        made = device_row(x, eps, implicit_zeros)  # before a row is taken: it may fail
        row = self.reserve([position])[0]
        row.copy_(made)
        return row

    def add_scalar(self, position: int, value: Tensor, eps: float) -> None:
        """Write a scalar to the next row, as its value and as a tensor of one element."""
        self.add(position, value, eps)[VALUE] = value

    def copy_to_host(self) -> tuple[npt.NDArray[np.intp], Tensor, Any]:
        """Start the one copy of the step into pinned memory; return it with the event that tells its end."""
        positions = np.asarray(self.positions, np.intp)
        rows = self._rows[: len(positions)]
        if self.device.type == "cpu":
            return positions, rows.clone(), None
        host = torch.empty(rows.shape, dtype=self.dtype, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        event = torch.Event(self.device)
        event.record()
        return positions, host, event

    def clear(self) -> None:
        """Start anew; copies under way are ordered before whatever is written next."""
        self.positions = []


def finish(rows: Tensor, divisor: Tensor | None, norms: Tensor | None) -> None:
    """Divide statistics by `divisor`, and write norm ÷ `norms` (shape (n,)) to the value column, where given."""
    if divisor is not None:
        rows[:, : NORM + 1] /= divisor.to(rows.device)
    if norms is not None:
        rows[:, VALUE] = rows[:, NORM] / norms
