"""Collects the rows of a step in execution order, and copies them to the host once."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainsentry.collectors.series import Layout, SeriesTable
from trainsentry.collectors.shared.host_rows import PendingRows, row_of_number
from trainsentry.collectors.statistics import COLUMNS, NORM, VALUE
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.rows.described_tensors import described_addresses
from trainsentry.collectors.torch.rows.device_rows import DeviceRows
from trainsentry.collectors.torch.rows.gathered_tensors import GatherLimits
from trainsentry.collectors.torch.rows.host_statistics import (
    address_of,
    host_counts,
    host_row,
    read_at,
    read_described_at,
    read_many_at,
    rows_and_counts,
)
from trainsentry.collectors.torch.rows.kernels.dense_tensors import DenseTensors
from trainsentry.collectors.torch.rows.local_tensor import PLAIN, is_batched, is_readable, local, stored_values
from trainsentry.collectors.torch.rows.pair_rows import Pairs, rows_of_host_pairs
from trainsentry.collectors.torch.rows.shard_layouts import ShardLayouts, dtype_name, take_local_parts
from trainsentry.collectors.torch.rows.shared_rows import SharedRows
from trainsentry.collectors.torch.rows.tensor_lists import (
    Batch,
    KnownHostList,
    KnownList,
    KnownLists,
    groups_of,
    inverse_of,
    layouts_of_list,
)
from trainsentry.collectors.torch.sharding.dtensor import is_dtensor
from trainsentry.collectors.torch.sharding.local_shards import Fragment, NamedParameter


class StepRows(SharedRows):
    """Collects the rows of the current step.

    A tensor whose statistics cannot be computed has no row; `refused` is called with the error. When a series is read
    twice in a step, the later row replaces the earlier.
    """

    def __init__(
        self,
        table: SeriesTable,
        eps: float = 0.0,
        refused: Callable[[Exception], None] | None = None,
        limits: GatherLimits | None = None,
        histograms: bool = False,
        *,
        device_rows_on_cpu: bool = False,
    ) -> None:
        super().__init__(table, eps, refused, limits, histograms=histograms)
        self._device_rows_on_cpu = device_rows_on_cpu
        self._knows_host_tensors &= not device_rows_on_cpu
        self._shard_layouts = ShardLayouts(table)
        self._lists = KnownLists(self._plain_layout)

    def add(self, series_id: int, tensor: Tensor) -> None:
        """Append the statistics of a tensor's part on this rank."""
        if self._is_captured():
            return
        address = 0 if self._device_rows_on_cpu else address_of(tensor)
        if address:
            self._attempt(self._add_dense_one, address, series_id, tensor)
        else:
            self._attempt(self._add_alone, series_id, tensor)

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
        if fragments is not None or not PLAIN.issuperset(map(type, tensors)):
            tensors, layouts = list(tensors), layouts or [None] * len(tensors)
            self._attempt(take_local_parts, tensors, fragments or [None] * len(tensors), layouts, self._shard_layouts)
        batch = Batch(len(self), tensors, divisor, norms)
        if self._add_in_place(batch, series_ids, layouts):
            return
        layouts = layouts or [None] * len(tensors)
        routes: list[int | DeviceRows | None] = [None] * len(tensors)
        self._attempt(self._find_routes, tensors, routes)
        if set(map(type, routes)) == {int}:
            self._attempt(self._add_dense, routes, batch, series_ids, layouts)
            return
        self._make_room(batch.start + len(tensors))
        for series_id, x, layout in zip(series_ids, tensors, layouts, strict=True):
            self._append(series_id, self._layout(x) if layout is None else layout)
        for key, places in groups_of(routes).items():
            self._attempt_rows([batch.start + i for i in places], self._read_group, key, routes, places, batch)

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

    def add_pairs(self, series_ids: Sequence[int], pairs: Pairs, layouts: Sequence[int | None]) -> None:
        """Append how each pair of tensors points, all on one device; see `collectors/alignment.py`.

        `layouts` are those of the parts of sharded tensors, None for whole ones.
        """
        if pairs and not self._is_captured():
            self._attempt(self._add_pairs, series_ids, pairs, layouts)

    def _add_pairs(self, series_ids: Sequence[int], pairs: Pairs, layouts: Sequence[int | None]) -> None:
        start, end, first = len(self), len(self) + len(pairs), pairs[0][0]
        self._make_room(end)
        if self._on_host(first):
            self._host[start:end] = rows_of_host_pairs(pairs)
        else:
            self._rows_on(first.device).add_pairs(range(start, end), pairs)
        self._layout_ids += [
            self._layout(x) if known is None else known for (x, _), known in zip(pairs, layouts, strict=True)
        ]
        self._ids += series_ids

    def norms(self, tensors: Sequence[Tensor], read_as: list[int]) -> Tensor:
        """Return the L2 norms of tensors of one device, shape (n,), on that device, without adding rows.

        They are not read again where the series `read_as` have rows of them in this step.
        """
        places = self._positions_of(read_as)
        known = None if places is None else self._norms_at(tensors[0], places)
        if known is not None:
            return known
        addresses = [address_of(x) for x in tensors]
        if self._device_rows_on_cpu or not all(addresses):
            wide = [x.abs() if x.is_complex() else x for x in tensors]
            return torch.stack(torch._foreach_norm(wide, 2, device_of(wide[0]).row_dtype))
        return torch.from_numpy(rows_and_counts(addresses, tensors, self.eps)[0][:, NORM])

    def _norms_at(self, of: Tensor, places: slice) -> Tensor | None:
        """Return the norms in consecutive rows of tensors that lie where `of` does, None where they are not known."""
        if self._on_host(of):
            return torch.from_numpy(self._host[places, NORM].copy())
        rows = self._devices.get(of.device)
        return None if rows is None else rows.norms_at(places)

    def add_scalar(self, series_id: int, value: "float | Tensor") -> None:
        """Append a scalar: a Python number, or a tensor of one element; never waits for a device."""
        if self._is_captured():
            return
        if isinstance(value, Tensor):
            scalar = local(value).reshape(())
            if not self._on_host(scalar):
                position = self._append(series_id, self._layout(scalar))
                self._rows_on(scalar.device).add_scalar(position, scalar)
                return
            value = scalar.item()
        position = self._append(series_id, self._plain_layout((), torch.float64))
        self._host_rows()[position] = (*row_of_number(float(value)), float(value))

    def add_numbers(self, series_id: int, numbers: Sequence[float]) -> None:
        """Append a row that holds only the given numbers, instead of statistics."""
        position = self._append(series_id, self._plain_layout((), torch.float64))
        self._host_rows()[position] = [*numbers, *[math.nan] * (COLUMNS - len(numbers))]

    def take(self) -> PendingRows:
        """Return the rows so far, and drop them; starts one copy per device that holds rows."""
        pending = self.peek()
        self.drop()
        return pending

    def drop(self) -> None:
        """Drop the rows; those that `peek` returned stay valid."""
        for rows in self._devices.values():
            rows.clear()
        self._clear_rows()
        self._forget_shared()

    def peek(self) -> PendingRows:
        """Return the rows so far, and keep them; starts the same copies as `take`."""
        self._make_room(len(self))
        devices = [rows for rows in self._devices.values() if rows]
        copies = [rows.copy_to_host() for rows in devices]
        overwritten = self._drop_unwritten()
        ids = self._recurring_ids.of(self._ids)
        return PendingRows(
            ids=ids,
            layouts=self._recurring_layouts.of(self._layout_ids),
            values=self._values_so_far(),
            kept=self._kept(ids),
            copies=copies,
            aliases=(self._recurring_aliases.of(self._aliases), self._recurring_sources.of(self._sources)),
            scalars=[position for rows in self._devices.values() for position in rows.scalars],
            overwritten=overwritten,
            counts=self._counts_so_far(),
            count_copies=[rows.copy_counts() for rows in devices if self.histograms],
            in_order=not self._has_host_values and any(rows.are_in_order(len(ids)) for rows in devices),
        )

    def _layout(self, tensor: Tensor) -> int:
        """Return the id of a tensor's layout; of a DTensor, that of its local shard."""
        if type(tensor) not in PLAIN and is_dtensor(tensor):  # a look at its type is cheaper
            return self._shard_layouts.of_dtensor(tensor)
        if tensor.is_nested:
            return self.table.layout_id(Layout((), dtype_name(tensor), tensor.numel()))
        return self._plain_layout(tensor.shape, tensor.dtype)

    def _add_dense_one(self, address: int, series_id: int, tensor: Tensor) -> None:
        position = len(self._ids)
        self._make_room(position + 1)
        read_at(address, tensor, self.eps, *self._place(position))
        self._append(series_id, self._layout(tensor))  # after reading, so that a failure leaves no row

    def _add_dense(
        self, addresses: list[int], batch: Batch, series_ids: Sequence[int], layouts: Sequence[int | None]
    ) -> None:
        """Append CPU tensors that the kernel reads in place."""
        end = batch.start + len(batch.tensors)
        self._make_room(end)
        read_many_at(addresses, batch.tensors, self.eps, *self._place(batch.start, len(batch.tensors)), batch.scale)
        self._finish_on_host(slice(batch.start, end), batch.divisor, batch.norms)
        known = self._lists.learn_on_host(series_ids, batch.tensors)
        self._layout_ids += layouts_of_list(known.layouts, layouts)
        self._ids += series_ids

    def _add_on_host(
        self, known: KnownHostList, batch: Batch, series_ids: Sequence[int], layouts: "Sequence[int | None] | None"
    ) -> bool:
        """Append CPU tensors that are as they were in the step before; False if they are not."""
        end = batch.start + len(batch.tensors)
        self._make_room(end)
        where = self._place_of_rows, batch.start
        if not read_described_at(known.description, known.largest, batch.tensors, *where, batch.scale):
            return False
        self._finish_on_host(slice(batch.start, end), batch.divisor, batch.norms)
        self._layout_ids += layouts_of_list(known.layouts, layouts)
        self._ids += series_ids
        return True

    def _add_in_place(self, batch: Batch, series_ids: Sequence[int], layouts: "Sequence[int | None] | None") -> bool:
        """Append tensors that the kernels of one device read in place, and of the host; False if there are others."""
        known = self._lists.of(series_ids)
        if isinstance(known, KnownHostList):
            if self._add_on_host(known, batch, series_ids, layouts):
                return True
            known = None
        addresses = None if known is None else described_addresses(batch.tensors, known.description)
        if known is None or addresses is None:
            rows = self._only_device(batch.tensors)
            host_places = [] if rows is None else [i for i, x in enumerate(batch.tensors) if self._on_host(x)]
            addresses = None if rows is None else self._addresses(rows, batch.tensors, host_places)
            if rows is None or addresses is None:
                return False
            known = self._lists.learn(series_ids, batch.tensors, host_places)
        else:
            rows = self._devices[known.device]
            if not rows.have_plain_formats(known.on_device(batch.tensors)):
                return False
        self._attempt(self._add_fused, rows, addresses, batch, series_ids, layouts, known)
        return True

    def _only_device(self, tensors: Sequence[Tensor]) -> "DeviceRows | None":
        """Return the rows of the one device whose tensors a list holds, perhaps beside ones in host memory."""
        if not self._device_rows_on_cpu and {x.get_device() for x in tensors} <= {-1}:
            return None
        if not PLAIN.issuperset(map(type, tensors)):
            return None
        devices = {x.device for x in tensors if not self._on_host(x)}
        return self._rows_on(devices.pop()) if len(devices) == 1 and not any(x.is_meta for x in tensors) else None

    def _addresses(self, rows: DeviceRows, tensors: Sequence[Tensor], host_places: list[int]) -> list[int] | None:
        """Return the addresses of plain tensors of one device and of the host, None where one cannot be read there."""
        if not host_places:
            return rows.addresses_in_place(tensors)
        on_host = set(host_places)
        found = [address_of(x) if i in on_host else rows.address_in_place(x) for i, x in enumerate(tensors)]
        return None if 0 in found else found

    def _add_fused(
        self,
        rows: DeviceRows,
        addresses: list[int],
        batch: Batch,
        series_ids: Sequence[int],
        layouts: "Sequence[int | None] | None",
        known: KnownList,
    ) -> None:
        """Append tensors that the kernels of one device, and of the host, read in place."""
        if known.host_places:
            self._make_room(batch.start + len(batch.tensors))
            self._read_group(int, addresses, known.host_places, batch)
        tensors, positions, norms = batch.of(known.places)
        rows.add_many(
            positions,
            DenseTensors(tensors, known.on_device(addresses), known.sizes, known.groups),
            batch.divisor,
        )
        rows.finish(len(tensors), batch.divisor, norms)
        self._layout_ids += layouts_of_list(known.layouts, layouts)
        self._ids += series_ids

    def _read_group(self, key: Any, routes: Sequence[Any], places: list[int], batch: Batch) -> None:
        """Write the rows of tensors that are read together; `key` is that of `groups_of`."""
        tensors, positions, norms = batch.of(places)
        if isinstance(key, DeviceRows):
            key.add_many(positions, key.dense(tensors), batch.divisor)
            key.finish(len(tensors), batch.divisor, norms)
        elif key is int:
            where, addresses = list(positions), [routes[i] for i in places]
            rows, counts = rows_and_counts(addresses, tensors, self.eps, batch.scale, histograms=self.histograms)
            self._host_rows()[where], self._counts[where[: len(counts)]] = rows, counts
            self._finish_on_host(where, batch.divisor, norms)
        else:
            part = local(tensors[0])
            if is_readable(part):
                self._read_alone(positions[0], part, batch.divisor, norms)
            else:
                self._dropped.add(positions[0])

    def _find_routes(self, tensors: Sequence[Tensor], routes: "list[int | DeviceRows | None]") -> None:
        """Set how each tensor is read: by its address, by its device's fused kernels, or alone (None)."""
        if self._device_rows_on_cpu:
            routes[:] = [self._device_route(x) for x in tensors]
            return
        found: list[int | DeviceRows | None] = [address_of(x) or None for x in tensors]
        if None in found:
            for i, x in enumerate(tensors):
                if found[i] is None:
                    found[i] = self._device_route(x)
        routes[:] = found

    def _device_route(self, x: Tensor) -> "DeviceRows | None":
        """Return the rows of a tensor's device if its fused kernels read the tensor in place."""
        if type(x) not in PLAIN or self._on_host(x) or x.is_meta:
            return None
        rows = self._rows_on(x.device)
        return rows if rows.address_in_place(x) else None

    def _add_alone(self, series_id: int, tensor: Tensor) -> None:
        """Append a tensor that no kernel reads in place."""
        if is_batched(tensor):
            return
        values = local(tensor)
        if is_readable(values):
            position = self._append(series_id, self._layout(tensor))
            self._attempt_rows([position], self._read_alone, position, values, None, None)

    def _read_alone(self, position: int, values: Tensor, divisor: Tensor | None, norm: Tensor | None) -> None:
        """Write the row of values that no kernel reads in place: sharded, sparse, or of another dtype or device."""
        stored, implicit = stored_values(values)
        if self._on_host(stored):
            self._host_rows()[position] = host_row(stored, self.eps, implicit)
            if self.histograms:
                self._counts[position] = host_counts(stored, implicit, inverse_of(divisor))
            self._finish_on_host([position], divisor, norm)
        else:
            rows = self._rows_on(stored.device)
            rows.add(position, stored, implicit, divisor)
            rows.finish(1, divisor, norm)

    def _finish_on_host(self, positions: "slice | list[int]", divisor: Tensor | None, norms: Tensor | None) -> None:
        if divisor is not None:
            self._host_rows()[positions, : NORM + 1] /= divisor.item()
        if norms is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                self._host_rows()[positions, VALUE] = self._host_rows()[positions, NORM] / norms.double().numpy()

    def _on_host(self, tensor: Tensor) -> bool:
        return tensor.is_cpu and not self._device_rows_on_cpu
