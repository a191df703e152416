"""The rows of a step: statistics in execution order, copied to the host once."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import COLUMNS, NORM, VALUE
from trainsentry.collectors.torch.device_rows import DeviceRows
from trainsentry.collectors.torch.device_statistics import row_dtype
from trainsentry.collectors.torch.host_statistics import (
    PLAIN,
    ROW_BYTES,
    address_of,
    host_row,
    read_at,
    read_many_at,
    row_of_number,
)
from trainsentry.collectors.torch.local_tensor import (
    is_readable,
    layout_of,
    local,
    stored_values,
    version_of,
    whole_of,
)
from trainsentry.collectors.torch.pending_rows import PendingRows
from trainsentry.collectors.torch.ways import runs_of

_NUMBER: Final = torch.zeros((), dtype=torch.float64)
"""Stands for a Python number where a layout is asked for."""


class StepRows:
    """Collects the rows of the current step.

    A tensor whose statistics cannot be computed gives no row; `refused` is told, with the error. When a series is
    read twice in a step, the later row replaces the earlier.
    """

    def __init__(
        self,
        table: SeriesTable,
        eps: float = 0.0,
        refused: Callable[[Exception], None] | None = None,
        *,
        device_rows_on_cpu: bool = False,
    ) -> None:
        self.table = table
        self.eps = eps
        self.refused = refused
        self._device_rows_on_cpu = device_rows_on_cpu
        self._layouts: dict[tuple[Any, Any], int] = {}
        self._devices: dict[torch.device, DeviceRows] = {}
        self._make_host(256)
        self._start()

    def _start(self) -> None:
        self._ids: list[int] = []
        self._layout_ids: list[int] = []
        self._aliases: list[tuple[int, int]] = []
        self._seen: dict[int, tuple[weakref.ref[Tensor], int | None, int]] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, series_id: int, tensor: Tensor) -> None:
        """Append the statistics of what `tensor` holds on this rank."""
        address = 0 if self._device_rows_on_cpu else address_of(tensor)
        if address:
            self._attempt(self._add_dense_one, address, series_id, tensor)
        else:
            self._attempt(self._add_other, series_id, tensor, None, None)

    def add_many(
        self,
        series_ids: Sequence[int],
        tensors: Sequence[Tensor],
        divisor: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> None:
        """Append the statistics of many tensors at once.

        They are divided by `divisor` where given. With `norms` (one number for each tensor) the value column gets
        each tensor's norm divided by its number.
        """
        ways: list[int | DeviceRows | None] = [None] * len(tensors)
        self._attempt(self._find_ways, tensors, ways)
        for start, end in runs_of(ways):
            part, way = slice(start, end), ways[start]
            some = None if norms is None else norms[part]
            if isinstance(way, int):
                self._attempt(self._add_dense, ways[part], series_ids[part], tensors[part], divisor, some)
            elif way is not None:
                self._attempt(self._add_fused, way, series_ids[part], tensors[part], divisor, some)
            else:
                self._attempt(self._add_other, series_ids[start], tensors[start], divisor, some)

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the L2 norms of tensors of one device, shape (n,), on that device, without a row in the record."""
        addresses = [address_of(x) for x in tensors]
        if self._device_rows_on_cpu or not all(addresses):
            wide = [x.abs() if x.is_complex() else x for x in tensors]
            return torch.stack(torch._foreach_norm(wide, 2, row_dtype(wide[0].device)))
        values = np.zeros((len(tensors), COLUMNS))
        read_many_at(addresses, tensors, self.eps, values.ctypes.data)
        return torch.from_numpy(values[:, NORM])

    def add_shared(self, series_id: int, tensor: Tensor) -> None:
        """Append the statistics of a tensor that other series may show too: it is read once a step."""
        whole = whole_of(tensor)
        known = self._seen.get(id(whole))
        if known is not None and known[0]() is whole and known[1] == version_of(whole) is not None:
            self._aliases.append((self._append(series_id, tensor), known[2]))
            return
        position = len(self._ids)
        self.add(series_id, tensor)
        if len(self._ids) > position:
            self._seen[id(whole)] = (weakref.ref(whole), version_of(whole), position)

    def add_scalar(self, series_id: int, value: "float | Tensor") -> None:
        """Append a scalar: a Python number, or a tensor of one element that is not waited for."""
        if isinstance(value, Tensor):
            scalar = local(value).reshape(())
            if not self._on_host(scalar):
                position = self._append(series_id, scalar)
                self._rows_on(scalar.device).add_scalar(position, scalar, self.eps)
                return
            value = scalar.item()
        position = self._append(series_id, _NUMBER)
        self._host[position] = (*row_of_number(float(value)), float(value))

    def take(self) -> PendingRows:
        """Return the rows so far and start anew; starts one copy per device that holds rows."""
        pending = self.peek()
        self.drop()
        return pending

    def drop(self) -> None:
        """Start anew; what was peeked at stays valid."""
        for rows in self._devices.values():
            rows.clear()
        self._start()

    def peek(self) -> PendingRows:
        """Return the rows so far and keep them; the same copies as `take`."""
        return PendingRows(
            ids=np.asarray(self._ids, np.int32),
            layouts=np.asarray(self._layout_ids, np.int32),
            values=self._host[: len(self)].copy(),
            kept=self._kept(),
            copies=[d.copy_to_host() for d in self._devices.values() if d.positions],
            aliases=list(self._aliases),
        )

    def _attempt(self, add: Callable[..., None], *args: Any) -> None:
        try:
            add(*args)
        except Exception as error:
            if self.refused is None:
                raise
            self.refused(error)

    def _add_dense_one(self, address: int, series_id: int, tensor: Tensor) -> None:
        position = len(self._ids)
        self._make_room(position + 1)
        read_at(address, tensor, self.eps, self._host_address + ROW_BYTES * position)
        self._append(series_id, tensor)  # behind the reading: one that fails leaves no row

    def _add_dense(
        self,
        addresses: list[int],
        series_ids: Sequence[int],
        tensors: Sequence[Tensor],
        divisor: Tensor | None,
        norms: Tensor | None,
    ) -> None:
        """Append CPU tensors that the kernel reads as they lie."""
        start = len(self)
        self._make_room(start + len(tensors))
        read_many_at(addresses, tensors, self.eps, self._host_address + ROW_BYTES * start)
        self._finish_on_host(slice(start, start + len(tensors)), divisor, norms)
        layouts = list(map(self._layouts.get, [(x.shape, x.dtype) for x in tensors]))
        self._layout_ids += [self._layout_of(x) if n is None else n for n, x in zip(layouts, tensors, strict=True)]
        self._ids += series_ids

    def _add_fused(
        self,
        rows: DeviceRows,
        series_ids: Sequence[int],
        tensors: Sequence[Tensor],
        divisor: Tensor | None,
        norms: Tensor | None,
    ) -> None:
        """Append tensors of one device that its fused kernels read as they lie."""
        rows.add_many(range(len(self), len(self) + len(tensors)), tensors, self.eps)
        rows.finish(len(tensors), divisor, norms)
        for series_id, tensor in zip(series_ids, tensors, strict=True):
            self._append(series_id, tensor)

    def _find_ways(self, tensors: Sequence[Tensor], ways: "list[int | DeviceRows | None]") -> None:
        ways[:] = [self._way_of(x) for x in tensors]

    def _way_of(self, x: Tensor) -> "int | DeviceRows | None":
        """Return how a tensor can be read among others: its address, its device's rows, or by itself only (None)."""
        if not self._device_rows_on_cpu:
            address = address_of(x)
            if address or x.is_cpu:
                return address or None
        if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested or not is_readable(x):
            return None
        rows = self._rows_on(x.device)
        return rows if rows.reads(x) else None

    def _add_other(self, series_id: int, tensor: Tensor, divisor: Tensor | None, norm: Tensor | None) -> None:
        """Append a tensor that the kernel cannot read as it lies: on a device, sharded, sparse, of another dtype."""
        values = local(tensor)
        if not is_readable(values):
            return
        stored, implicit = stored_values(values)
        if self._on_host(stored):
            row = host_row(stored, self.eps, implicit)
            position = self._append(series_id, values)
            self._host[position] = row
            self._finish_on_host(slice(position, position + 1), divisor, norm)
        else:
            rows = self._rows_on(stored.device)
            rows.add(len(self), stored, self.eps, implicit)
            rows.finish(1, divisor, norm)
            self._append(series_id, values)

    def _finish_on_host(self, positions: slice, divisor: Tensor | None, norms: Tensor | None) -> None:
        if divisor is not None:
            self._host[positions, : NORM + 1] /= divisor.item()
        if norms is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                self._host[positions, VALUE] = self._host[positions, NORM] / norms.double().numpy()

    def _kept(self) -> npt.NDArray[np.bool_]:
        """Return which rows stand: of those of one series the last."""
        kept = np.ones(len(self), bool)
        if len(set(self._ids)) < len(self):
            last = {series_id: position for position, series_id in enumerate(self._ids)}
            kept[:] = False
            kept[list(last.values())] = True
        return kept

    def _on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and not self._device_rows_on_cpu

    def _rows_on(self, device: torch.device) -> DeviceRows:
        rows = self._devices.get(device)
        if rows is None:
            rows = self._devices[device] = DeviceRows(device)
        return rows

    def _append(self, series_id: int, tensor: Tensor) -> int:
        """Append a row to the record, whose numbers are written elsewhere; return its position."""
        layout = self._layouts.get((tensor.shape, tensor.dtype)) if not tensor.is_nested else None
        position = len(self._ids)
        self._make_room(position + 1)
        self._ids.append(series_id)
        self._layout_ids.append(self._layout_of(tensor) if layout is None else layout)
        return position

    def _layout_of(self, tensor: Tensor) -> int:
        layout = self.table.layout_id(layout_of(tensor))
        if not tensor.is_nested:
            self._layouts[tensor.shape, tensor.dtype] = layout
        return layout

    def _make_room(self, rows: int) -> None:
        if rows > len(self._host):
            old = self._host
            self._make_host(max(rows, 2 * len(old)))
            self._host[: len(old)] = old

    def _make_host(self, rows: int) -> None:
        self._host = np.zeros((rows, COLUMNS))
        self._host_address = self._host.ctypes.data  # asked for once: it costs as much as reading a small tensor
