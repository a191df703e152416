"""Collects the rows of a step in execution order, and copies them to the host once."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from trainsentry.collectors.series import Layout, SeriesTable
from trainsentry.collectors.shared.host_rows import HostRows, PendingRows, row_of_number
from trainsentry.collectors.statistics import COLUMNS, NORM, VALUE
from trainsentry.collectors.torch.graph_capture import stream_is_captured
from trainsentry.collectors.torch.rows.device_rows import DeviceRows
from trainsentry.collectors.torch.rows.device_statistics import row_dtype
from trainsentry.collectors.torch.rows.host_statistics import (
    PLAIN,
    ROW_BYTES,
    address_of,
    host_row,
    read_at,
    read_many_at,
)
from trainsentry.collectors.torch.rows.local_tensor import (
    is_readable,
    local,
    stored_values,
    version_of,
    whole_of,
)
from trainsentry.collectors.torch.rows.shard_layouts import ShardLayouts, dtype_name, take_local_parts
from trainsentry.collectors.torch.sharding.dtensor import is_dtensor
from trainsentry.collectors.torch.sharding.local_shards import Fragment, NamedParameter

_NUMBER: Final = torch.zeros((), dtype=torch.float64)
"""A tensor with the layout of a Python number."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors that are read in one way: what this rank holds of each, and what their rows are divided by."""

    ids: Sequence[int]
    tensors: Sequence[Tensor]
    layouts: Sequence[int | None]
    divisor: Tensor | None
    norms: Tensor | None


def batches_of(routes: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive tensors that are read together; those of None stand alone.

    >>> list(batches_of([8, 9, None, None, 7]))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    if set(map(type, routes)) == {int}:
        yield 0, len(routes)
        return
    start = 0
    for i in range(1, len(routes) + 1):
        if i == len(routes) or _together(routes[i - 1]) != _together(routes[i]) or routes[i] is None:
            yield start, i
            start = i


def _together(way: Any) -> Any:
    return int if isinstance(way, int) else way


class StepRows(HostRows):
    """Collects the rows of the current step.

    A tensor whose statistics cannot be computed has no row; `refused` is called with the error. When a series is read
    twice in a step, the later row replaces the earlier.
    """

    def __init__(
        self,
        table: SeriesTable,
        eps: float = 0.0,
        refused: Callable[[Exception], None] | None = None,
        *,
        device_rows_on_cpu: bool = False,
    ) -> None:
        super().__init__(table, eps, refused)
        self._device_rows_on_cpu = device_rows_on_cpu
        self._shard_layouts = ShardLayouts(table)
        self._devices: dict[torch.device, DeviceRows] = {}
        self._accelerated = torch.accelerator.is_available()
        self._start()

    def _start(self) -> None:
        self._clear_rows()
        self._aliases: list[tuple[int, int]] = []
        self._seen: dict[int, tuple[weakref.ref[Tensor], int | None, int]] = {}

    def add(self, series_id: int, tensor: Tensor) -> None:
        """Append the statistics of a tensor's part on this rank."""
        if self._is_captured():
            return
        address = 0 if self._device_rows_on_cpu else address_of(tensor)
        if address:
            self._attempt(self._add_dense_one, address, series_id, tensor)
        else:
            self._attempt(self._add_other, series_id, tensor)

    def add_many(
        self,
        series_ids: Sequence[int],
        tensors: Sequence[Tensor],
        divisor: Tensor | None = None,
        norms: Tensor | None = None,
        fragments: "Sequence[Fragment | None] | None" = None,
        layouts: "list[int | None] | None" = None,
    ) -> None:
        """Append the statistics of many tensors at once, divided by `divisor` (one element) where given.

        With `norms`, of shape (n,), the value column is each tensor's norm divided by its number. `fragments` are the
        parts to read, None for a whole tensor. `layouts` locate tensors that are already this rank's part of a sharded
        one.
        """
        if self._is_captured():
            return
        layouts = layouts or [None] * len(tensors)
        if fragments is not None or not PLAIN.issuperset(map(type, tensors)):
            tensors = list(tensors)
            self._attempt(take_local_parts, tensors, fragments or [None] * len(tensors), layouts, self._shard_layouts)
        routes: list[int | DeviceRows | None] = [None] * len(tensors)
        self._attempt(self._find_routes, tensors, routes)
        for start, end in batches_of(routes):
            part, route = slice(start, end), routes[start]
            some = None if norms is None else norms[part]
            batch = Batch(series_ids[part], tensors[part], layouts[part], divisor, some)
            if isinstance(route, int):
                self._attempt(self._add_dense, routes[part], batch)
            elif route is not None:
                self._attempt(self._add_fused, route, batch)
            else:
                self._attempt(self._add_other, series_ids[start], tensors[start], batch)

    def add_parameters(
        self,
        series_ids: Sequence[int],
        parameters: Sequence[NamedParameter],
        tensors: Sequence[Tensor],
        divisor: Tensor | None = None,
    ) -> None:
        """Append a row for each parameter's part of a tensor that is laid out like the parameter."""
        fragments = [named.fragment for named in parameters]
        self.add_many(series_ids, tensors, divisor, fragments=fragments if any(fragments) else None)

    def layouts_of(self, parameters: Sequence[NamedParameter]) -> list[int | None]:
        """Return the layouts of this rank's parts of parameters; None stands for that of a plain tensor."""
        return [self._shard_layouts.of(named.parameter, named.fragment) for named in parameters]

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the L2 norms of tensors of one device, shape (n,), on that device, without adding rows."""
        addresses = [address_of(x) for x in tensors]
        if self._device_rows_on_cpu or not all(addresses):
            wide = [x.abs() if x.is_complex() else x for x in tensors]
            return torch.stack(torch._foreach_norm(wide, 2, row_dtype(wide[0].device)))
        values = np.zeros((len(tensors), COLUMNS))
        read_many_at(addresses, tensors, self.eps, values.ctypes.data)
        return torch.from_numpy(values[:, NORM])

    def add_shared(self, series_id: int, tensor: Tensor) -> None:
        """Append the statistics of a tensor that several series may share: it is read once a step."""
        if self._is_captured():
            return
        whole = whole_of(tensor)
        known = self._seen.get(id(whole))
        if known is not None and known[0]() is whole and known[1] == version_of(whole) is not None:
            self._aliases.append((self._append(series_id, self._layout(tensor)), known[2]))
            return
        position = len(self._ids)
        self.add(series_id, tensor)
        if len(self._ids) > position:
            self._seen[id(whole)] = (weakref.ref(whole), version_of(whole), position)

    def add_scalar(self, series_id: int, value: "float | Tensor") -> None:
        """Append a scalar: a Python number, or a tensor of one element; never waits for a device."""
        if self._is_captured():
            return
        if isinstance(value, Tensor):
            scalar = local(value).reshape(())
            if not self._on_host(scalar):
                position = self._append(series_id, self._layout(scalar))
                self._rows_on(scalar.device).add_scalar(position, scalar, self.eps)
                return
            value = scalar.item()
        position = self._append(series_id, self._plain_layout(_NUMBER.shape, _NUMBER.dtype))
        self._host[position] = (*row_of_number(float(value)), float(value))

    def add_numbers(self, series_id: int, numbers: Sequence[float]) -> None:
        """Append a row that holds only the given numbers, instead of statistics."""
        position = self._append(series_id, self._plain_layout(_NUMBER.shape, _NUMBER.dtype))
        self._host[position] = math.nan
        self._host[position, : len(numbers)] = numbers

    def take(self) -> PendingRows:
        """Return the rows so far, and drop them; starts one copy per device that holds rows."""
        pending = self.peek()
        self.drop()
        return pending

    def drop(self) -> None:
        """Drop the rows; those that `peek` returned stay valid."""
        for rows in self._devices.values():
            rows.clear()
        self._start()

    def peek(self) -> PendingRows:
        """Return the rows so far, and keep them; starts the same copies as `take`."""
        return PendingRows(
            ids=np.asarray(self._ids, np.int32),
            layouts=np.asarray(self._layout_ids, np.int32),
            values=self._host[: len(self)].copy(),
            kept=self._kept(),
            copies=[d.copy_to_host() for d in self._devices.values() if d.positions],
            aliases=list(self._aliases),
        )

    def _layout(self, tensor: Tensor) -> int:
        """Return the id of a tensor's layout; of a DTensor, that of its local shard."""
        if type(tensor) not in PLAIN and is_dtensor(tensor):  # a look at its type is cheaper
            return self._shard_layouts.of_dtensor(tensor)
        if tensor.is_nested:
            return self.table.layout_id(Layout((), dtype_name(tensor), tensor.numel()))
        return self._plain_layout(tensor.shape, tensor.dtype)

    def _is_captured(self) -> bool:
        """Whether a device graph is being captured: a row would be computed at each replay, but not now."""
        return self._accelerated and stream_is_captured()

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
        self._append(series_id, self._layout(tensor))  # after reading, so that a failure leaves no row

    def _add_dense(self, addresses: list[int], batch: "Batch") -> None:
        """Append CPU tensors that the kernel reads in place."""
        start, count = len(self), len(batch.tensors)
        self._make_room(start + count)
        read_many_at(addresses, batch.tensors, self.eps, self._host_address + ROW_BYTES * start)
        self._finish_on_host(slice(start, start + count), batch.divisor, batch.norms)
        self._note(batch)

    def _add_fused(self, rows: DeviceRows, batch: "Batch") -> None:
        """Append tensors of one device that its fused kernels read in place."""
        start, count = len(self), len(batch.tensors)
        rows.add_many(range(start, start + count), batch.tensors, self.eps)
        rows.finish(count, batch.divisor, batch.norms)
        self._make_room(start + count)
        self._note(batch)

    def _note(self, batch: "Batch") -> None:
        """Append the ids and layouts of tensors whose rows are written."""
        of = self._plain_layout
        pairs = zip(batch.layouts, batch.tensors, strict=True)
        self._layout_ids += [of(x.shape, x.dtype) if n is None else n for n, x in pairs]
        self._ids += batch.ids

    def _find_routes(self, tensors: Sequence[Tensor], routes: "list[int | DeviceRows | None]") -> None:
        """Set how each tensor is read: by its address, by its device's fused kernels, or alone (None)."""
        if self._device_rows_on_cpu:
            routes[:] = [self._device_route(x) for x in tensors]
            return
        found: list[int | DeviceRows | None] = [address_of(x) or None for x in tensors]
        if None in found:
            for i, x in enumerate(tensors):
                if found[i] is None and not x.is_cpu:
                    found[i] = self._device_route(x)
        routes[:] = found

    def _device_route(self, x: Tensor) -> "DeviceRows | None":
        if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested or not is_readable(x):
            return None
        rows = self._rows_on(x.device)
        return rows if rows.reads(x) else None

    def _add_other(self, series_id: int, tensor: Tensor, batch: "Batch | None" = None) -> None:
        """Append a tensor that no kernel reads in place: on a device, sharded, sparse, or of another dtype."""
        values = local(tensor)
        if not is_readable(values):
            return
        known = None if batch is None else batch.layouts[0]
        layout = self._layout(tensor) if known is None else known
        divisor, norm = (None, None) if batch is None else (batch.divisor, batch.norms)
        stored, implicit = stored_values(values)
        if self._on_host(stored):
            row = host_row(stored, self.eps, implicit)
            position = self._append(series_id, layout)
            self._host[position] = row
            self._finish_on_host(slice(position, position + 1), divisor, norm)
        else:
            rows = self._rows_on(stored.device)
            rows.add(len(self), stored, self.eps, implicit)
            rows.finish(1, divisor, norm)
            self._append(series_id, layout)

    def _finish_on_host(self, positions: slice, divisor: Tensor | None, norms: Tensor | None) -> None:
        if divisor is not None:
            self._host[positions, : NORM + 1] /= divisor.item()
        if norms is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                self._host[positions, VALUE] = self._host[positions, NORM] / norms.double().numpy()

    def _on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and not self._device_rows_on_cpu

    def _rows_on(self, device: torch.device) -> DeviceRows:
        rows = self._devices.get(device)
        if rows is None:
            rows = self._devices[device] = DeviceRows(device)
        return rows
