"""Keeps a step's rows on an accelerator, where they are computed, and copies them to the host once."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.statistics import COLUMNS, NORM, VALUE
from trainsentry.collectors.torch.rows.device_statistics import device_row, row_dtype
from trainsentry.collectors.torch.rows.fused_rows import FusedRows, kernels_for

logger = logging.getLogger("trainsentry")

MOST_AT_ONCE: Final = 32_768
"""Tensors per launch: half the number of partial rows, so that each tensor has room."""

FIRST_ROWS: Final = 256
"""Rows of the first buffer (16 kB), which doubles when a step has more."""


class DeviceRows:
    """Rows of one device in one buffer, in the order in which they were added."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = row_dtype(device)
        self.positions: list[int] = []
        self._rows = torch.empty(FIRST_ROWS, COLUMNS, dtype=self.dtype, device=device)
        kernels = kernels_for(device)
        self.fused = FusedRows(device, kernels) if kernels is not None else None

    def add(self, position: int, x: Tensor, eps: float, implicit_zeros: int = 0) -> None:
        """Write the statistics of `x` to the next row."""
        if not implicit_zeros and self.reads(x) and self._fuse([position], [x], eps):
            return
        row = device_row(x, eps, implicit_zeros)  # before a row is reserved, as this may fail
        self._reserve([position])[0].copy_(row)

    def add_many(self, positions: Sequence[int], tensors: Sequence[Tensor], eps: float) -> None:
        """Write the statistics of tensors that the fused kernels read to the next rows."""
        for start in range(0, len(tensors), MOST_AT_ONCE):
            some = slice(start, start + MOST_AT_ONCE)
            if not self._fuse(positions[some], tensors[some], eps):
                for position, x in zip(positions[some], tensors[some], strict=True):
                    self.add(position, x, eps)

    def reads(self, x: Tensor) -> bool:
        """Whether the fused kernels run on this device and can read a tensor in place."""
        return self.fused is not None and self.fused.reads(x)

    def _fuse(self, positions: Sequence[int], tensors: Sequence[Tensor], eps: float) -> bool:
        """Read tensors by the fused kernels; False when they cannot run, and then they are not tried again."""
        if self.fused is None:
            return False
        slot = len(self.positions)
        self._reserve(positions)
        try:
            if len(tensors) == 1:
                self.fused.begin(slot, tensors[0], eps, self._rows)
            else:
                self.fused.begin_many(range(slot, slot + len(tensors)), tensors, eps, self._rows)
        except Exception as error:  # noqa: BLE001 - whatever the compiler or the driver raises
            logger.warning("trainsentry: the fused kernels do not run on %s; slower ones do: %s", self.device, error)
            del self.positions[slot:]
            self.fused.forget(slot)
            self._combine()
            self.fused = None
            return False
        return True

    def add_scalar(self, position: int, value: Tensor, eps: float) -> None:
        """Write a scalar to the next row, as its value and as a tensor of one element."""
        made = device_row(value, eps)
        made[VALUE] = value
        self._reserve([position])[0].copy_(made)

    def finish(self, count: int, divisor: Tensor | None, norms: Tensor | None) -> None:
        """Divide the last `count` rows by `divisor`, and write norm ÷ `norms` (shape (count,)) to their values."""
        if divisor is None and norms is None:
            return
        self._combine()
        rows = self._rows[len(self.positions) - count : len(self.positions)]
        if divisor is not None:
            rows[:, : NORM + 1] /= divisor.to(rows.device)
        if norms is not None:
            rows[:, VALUE] = rows[:, NORM] / norms

    def _reserve(self, positions: Sequence[int]) -> Tensor:
        """Take the next rows for the given positions of the record; return them, shape (n, COLUMNS)."""
        start = len(self.positions)
        end = start + len(positions)
        if end > len(self._rows):
            self._combine()  # writes the rows under way to the current buffer
            grown = torch.empty(max(end, 2 * len(self._rows)), COLUMNS, dtype=self.dtype, device=self.device)
            grown[:start].copy_(self._rows[:start])
            self._rows = grown
        self.positions += positions
        return self._rows[start:end]

    def _combine(self) -> None:
        if self.fused is not None:
            self.fused.combine(self._rows)

    def copy_to_host(self) -> tuple[npt.NDArray[np.intp], Callable[[], npt.NDArray[Any]], Any]:
        """Start the step's one copy into pinned memory; return positions, a function that reads it, and its event."""
        self._combine()
        positions = np.asarray(self.positions, np.intp)
        rows = self._rows[: len(positions)]
        if self.device.type == "cpu":
            return positions, rows.clone().numpy, None
        host = torch.empty(rows.shape, dtype=self.dtype, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        event = torch.Event(self.device)
        event.record()
        return positions, host.numpy, event

    def clear(self) -> None:
        """Drop the rows; copies under way finish before the next row is written."""
        self.positions = []
