"""Collects the rows of a step in execution order, and copies them to the host once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops

from trainsentry.collectors.alignment import row_of_pair
from trainsentry.collectors.histogram import counts_of
from trainsentry.collectors.mindspore.rows.tensor_statistics import (
    array_of,
    as_float,
    device_pair_row,
    device_row,
    dtype_of,
    read,
    row_of,
    row_of_values,
)
from trainsentry.collectors.mindspore.runtime import on_host
from trainsentry.collectors.series import UNKNOWN_REGION, Layout, SeriesTable
from trainsentry.collectors.shared.host_rows import HostRows, PendingRows, row_of_number
from trainsentry.collectors.statistics import COLUMNS, NORM, VALUE


class StepRows(HostRows):
    """Collects the rows of the current step.

    On the CPU a tensor is read in place, after the caller has waited for it. On an accelerator operations there compute
    its row, and all rows reach the host in one copy. A tensor whose statistics cannot be computed has no row;
    `refused` is called with the error. When a series is read twice in a step, the later row replaces the earlier.
    """

    def __init__(
        self,
        table: SeriesTable,
        eps: float = 0.0,
        refused: Callable[[Exception], None] | None = None,
        *,
        rows_on_device: bool | None = None,
        histograms: bool = False,
    ) -> None:
        super().__init__(table, eps, refused, histograms=histograms)
        self.on_device = not on_host() if rows_on_device is None else rows_on_device
        self._device_rows: list[tuple[int, Tensor]] = []
        self._unread: list[tuple[int, Tensor]] = []
        self._scratch = np.zeros(COLUMNS)

    def add(self, series_id: int, tensor: Tensor, divisor: float = 1.0) -> int | None:
        """Append the statistics of a tensor, divided by `divisor`; return the row's position, None without a row."""
        try:
            return self._add(series_id, tensor, divisor)
        except Exception as error:
            if self.refused is None:
                raise
            self.refused(error)
            return None

    def _add(self, series_id: int, tensor: Tensor, divisor: float) -> int:
        position = len(self)
        self._make_room(position + 1)
        if self.on_device:
            row = device_row(tensor, self.eps)
            self._device_rows.append((position, self._divided(row, divisor)))
        else:
            row, counts = self._place(position)
            if not read(tensor, self.eps, row, counts, 1.0 / divisor):
                self._host[position] = row_of(tensor, self.eps)
                if self.histograms:
                    self._counts[position] = counts_of(as_float(array_of(tensor)), 1.0 / divisor)
            if divisor != 1.0:
                self._host[position, : NORM + 1] /= divisor
        return self._append(series_id, self._layout(tensor))

    def add_array(self, series_id: int, array: npt.NDArray[Any], like: Tensor, norm: float) -> None:
        """Append the statistics of an array, with the layout of tensor `like` and norm ÷ `norm` as the value."""
        position = self._append(series_id, self._layout(like))
        self._host[position] = row_of_values(array, self.eps)
        if self.histograms:
            self._counts[position] = counts_of(array)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._host[position, VALUE] = np.float64(self._host[position, NORM]) / norm

    def add_device_ratio(self, series_id: int, difference: Tensor, norm: Tensor) -> None:
        """Append the statistics of a difference on its device, with its norm ÷ `norm` as the value."""
        row = device_row(difference, self.eps)
        position = self._append(series_id, self._layout(difference))
        value = (row[NORM] / norm).reshape((1,))
        self._device_rows.append((position, ops.concat([row[:VALUE], value])))

    def add_pair(self, series_id: int, first: Tensor, second: Tensor) -> None:
        """Append how two tensors of one shape point, with the layout of the first; see `collectors/alignment.py`."""
        if self.on_device:
            row: Any = device_pair_row(first, second)
            self._device_rows.append((self._append(series_id, self._layout(first)), row))
        else:
            row = row_of_pair(array_of(first), array_of(second))
            self._host[self._append(series_id, self._layout(first))] = row

    def add_scalar(self, series_id: int, value: "float | Tensor") -> None:
        """Append a scalar: a Python number or a tensor of one element; on an accelerator, without waiting for it."""
        if isinstance(value, Tensor) and self.on_device:
            row = device_row(value, self.eps)
            number = ops.cast(value, row.dtype).reshape((1,))
            position = self._append(series_id, self._layout(value))
            self._device_rows.append((position, ops.concat([row[:VALUE], number])))
            return
        if isinstance(value, Tensor):  # read after the step's operations have ended
            self._unread.append((self._append(series_id, self._layout(value)), value))
            return
        position = self._append(series_id, self._plain_layout((), "float64"))
        self._host[position] = (*row_of_number(float(value)), float(value))

    def add_numbers(self, series_id: int, numbers: Sequence[float]) -> None:
        """Append a row that holds only the given numbers, instead of statistics."""
        position = self._append(series_id, self._plain_layout((), "float64"))
        self._host[position] = np.nan
        self._host[position, : len(numbers)] = numbers

    def norm_of(self, tensor: Tensor) -> float:
        """Return the norm of a host tensor, without adding a row."""
        if read(tensor, self.eps, self._scratch.ctypes.data):
            return float(self._scratch[NORM])
        return float(row_of(tensor, self.eps)[NORM])

    def take(self) -> PendingRows:
        """Return the rows so far, and drop them."""
        pending = self.peek()
        self.drop()
        return pending

    def drop(self) -> None:
        """Drop the rows; those that `peek` returned stay valid."""
        self._clear_rows()
        self._device_rows = []
        self._unread = []

    def peek(self) -> PendingRows:
        """Return the rows so far, and keep them."""
        copies = []
        for position, tensor in self._unread:
            number = float(tensor.asnumpy().reshape(-1)[0])
            self._host[position] = (*row_of_number(number), number)
        self._unread = []
        if self._device_rows:
            stacked = ops.stack([row for _, row in self._device_rows])
            positions = np.asarray([position for position, _ in self._device_rows], np.intp)
            copies.append((positions, stacked.asnumpy, _NextStep()))
        ids = self._recurring_ids.of(self._ids)
        return PendingRows(
            ids=ids,
            layouts=np.asarray(self._layout_ids, np.int32),
            values=self._host[: len(self)].copy(),
            kept=self._kept(ids),
            copies=copies,
            counts=self._counts_so_far(),
        )

    def _divided(self, row: Tensor, divisor: float) -> Tensor:
        return row if divisor == 1.0 else ops.concat([row[: NORM + 1] / divisor, row[NORM + 1 :]])

    def _layout(self, tensor: Tensor) -> int:
        dtype = dtype_of(tensor)
        if getattr(tensor, "sliced", False) is not True:
            return self._plain_layout(tensor.shape, dtype)
        # The compiler cut this parameter, and does not say which part of it lies on this rank.
        layout = Layout(tuple(int(n) for n in tensor.shape), dtype, int(tensor.size), region=UNKNOWN_REGION)
        return self.table.layout_id(layout)


class _NextStep:
    """Replaces a device event, which MindSpore lacks on some devices: the rows count as ready at the second query."""

    def __init__(self) -> None:
        self._queries = 0

    def query(self) -> bool:
        self._queries += 1
        return self._queries > 1

    def synchronize(self) -> None:
        """Do nothing: the copy itself waits."""
